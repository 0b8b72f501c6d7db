"""A program that ends without closing its pool leaves no worker, and says nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree_worlds.household.environment import HouseholdEnvironment, generated

if __name__ == "__main__":
    import atexit

    pool = ProcessPool(ProcessPoolConfig(workers=2))
    atexit.register(pool.shut_down)
    game = generated(1, "easy")
    pool.reset(pool.open(HouseholdEnvironment(game)))
    (begun,) = pool.poll().values()
    assert begun.fault is None
    print(*(worker._process.pid for worker in pool._workers if worker._process))
"""


def test_a_pool_that_is_shut_down_as_the_interpreter_ends_ends_its_workers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    until = time.monotonic() + 20
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
