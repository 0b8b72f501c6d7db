"""The laws of a worker pool, with real processes that die and hang: every unit ends exactly once, and nothing
waits for ever."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.pool import UnitLost, WorkerPool

OBEDIENT = "pool_factories:obedient"
pytestmark = pytest.mark.usefixtures("two_nodes")


def pool(factory: str = OBEDIENT, **settings: Any) -> WorkerPool:
    return WorkerPool(factory, {}, WorkersConfig(**{"workers": 2, "cpus": 0.5, **settings}))


def numbers(count: int) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


def test_units_whose_workers_die_or_hang_are_played_by_others_exactly_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {5: {"do": "die"}, 13: {"do": "sleep", "seconds": 600}}
    units = [{**unit, **faults.get(unit["number"], {})} for unit in numbers(20)]
    for number in faults:
        units[number]["once"] = str(tmp_path / str(number))
    with pool(unit_seconds=5) as workers:
        assert [each.result() for each in list(map(workers.submit, units))] == list(range(20))
        assert workers.lost == 2
    assert capsys.readouterr().err.count("its work is given to another one") == 2


def test_a_unit_that_kills_every_worker_is_lost_with_its_reason_and_costs_no_other_unit() -> None:
    with pool(attempts=2) as workers:
        poison = workers.submit({"number": 0, "do": "die"})
        others = [workers.submit(unit) for unit in numbers(6)]
        with pytest.raises(UnitLost, match="2 workers were lost over one unit of work"):
            poison.result(timeout=60)
        assert [each.result(timeout=60) for each in others] == list(range(6))
        assert workers.lost == 2


def test_an_error_of_a_worker_reaches_the_command_as_it_was_raised() -> None:
    with pool(workers=1) as workers:
        with pytest.raises(InputError) as refused:
            workers.submit({"do": "refuse"}).result(timeout=60)
        assert str(refused.value) == "a.jsonl:3: field 'reward': is wrong; write 0.0"
        with pytest.raises(TurntreeError, match="ZeroDivisionError: of a user's part"):
            workers.submit({"do": "crash"}).result(timeout=60)
        assert workers.submit({"number": 7}).result(timeout=60) == 7, "the worker lives on"


def test_what_a_worker_cannot_build_ends_every_unit_with_one_line() -> None:
    with pool("pool_factories:refused") as workers, pytest.raises(InputError, match="name a folder"):
        workers.submit({"number": 0}).result(timeout=60)


def test_workers_that_the_cluster_has_no_room_for_end_the_wait_with_what_is_missing() -> None:
    with pool(cpus=64, start_seconds=1) as workers, pytest.raises(ConfigError, match="one needs 64 CPU"):
        workers.submit({"number": 0}).result(timeout=60)


def test_an_urgent_unit_goes_before_those_that_wait() -> None:
    with pool(workers=1) as workers:
        ended: list[str] = []
        units = {"first": False, "waiting": False, "urgent": True}
        for name, urgent in units.items():
            future = workers.submit({"number": name, "do": "sleep", "seconds": 0.3}, urgent=urgent)
            future.add_done_callback(lambda done: ended.append(done.result()))
        workers.submit({"number": 0}).result(timeout=60)
        assert ended[-1] == "waiting"


def test_workers_die_with_their_command(two_nodes: Any, tmp_path: Path) -> None:
    script = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from turntree.rollout.cluster.config import WorkersConfig
        from turntree.rollout.cluster.pool import WorkerPool

        config = WorkersConfig(workers=1, cpus=0.5, address={two_nodes.address!r})
        with WorkerPool({OBEDIENT!r}, {{}}, config) as workers:
            print(workers.submit({{"number": 0, "do": "tell"}}).result()["pid"], flush=True)
            workers.submit({{"number": 0, "do": "sleep", "seconds": 600}}).result()
    """
    started = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        command.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
