"""A node that the network loses and finds again. Opt-in (`make test-network`): it needs root and `ip` of iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.pool import WorkerPool

asked = os.environ.get("TURNTREE_NETWORK_DRILL") == "1"
pytestmark = pytest.mark.skipif(not asked, reason="opt-in: make test-network")
HERE, THERE, PORT, SPACE = "10.231.77.1", "10.231.77.2", 6397, "turntree-drill"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespace() -> Iterator[None]:
    """A network namespace that a pair of virtual devices connects with this one."""
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", "ttd0", "type", "veth", "peer", "name", "ttd1", "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", "ttd0")
        ip("link", "set", "ttd0", "up")
        for words in (("addr", "add", f"{THERE}/24", "dev", "ttd1"), ("link", "set", "ttd1", "up")):
            ip("-n", SPACE, *words)
        ip("-n", SPACE, "link", "set", "lo", "up")
        yield
    finally:
        ip("netns", "del", SPACE)
        subprocess.run(["ip", "link", "del", "ttd0"], capture_output=True)


@contextmanager
def node(before: list[str], *words: str) -> Iterator[None]:
    """`ray start`, and all that it starts, killed at the end (`ray stop` would stop every Ray of this machine)."""
    ray = [str(Path(sys.executable).with_name("ray"))]
    if not Path(ray[0]).exists():
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
    command = [*before, *ray, "start", "--block", "--num-cpus=1", "--object-store-memory=80000000", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray: Any = pytest.importorskip("ray")
    assert not ray.is_initialized(), "run it alone"
    with ExitStack() as stack:
        stack.enter_context(namespace())
        head = ["--head", f"--port={PORT}", f"--node-ip-address={HERE}", "--include-dashboard=false"]
        stack.enter_context(node([], *head))
        time.sleep(12)  # until the head takes nodes
        there = ["ip", "netns", "exec", SPACE]
        stack.enter_context(node(there, f"--address={HERE}:{PORT}", f"--node-ip-address={THERE}"))
        ray.init(address=f"{HERE}:{PORT}", _node_ip_address=HERE, log_to_driver=False, logging_level="error")
        stack.callback(ray.shutdown)
        until = time.monotonic() + 60
        while sum(each["Alive"] for each in ray.nodes()) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        yield SPACE


def test_units_of_a_node_that_is_cut_off_are_played_elsewhere_and_it_works_again_when_it_is_back(
    split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = WorkersConfig(workers=2)
    with WorkerPool("pool_factories:obedient", {}, config) as pool:
        while len(pool.living) < 2:
            time.sleep(0.1)
        assert len(set(pool.living.values())) == 2, "a worker on either side"
        cut = threading.Timer(3.0, lambda: ip("link", "set", "ttd0", "down"))
        cut.start()
        started = time.monotonic()
        units = [{"number": number, "do": "sleep", "seconds": 0.5} for number in range(40)]
        assert [each.result() for each in list(map(pool.submit, units))] == list(range(40))
        given_again = capsys.readouterr().err.count("its work is given to another one")
        with capsys.disabled():
            print(f"\n40 units in {time.monotonic() - started:.1f} s, {pool.lost} lost, {given_again} given again")
        assert pool.lost >= 1 and given_again == 1
        ip("link", "set", "ttd0", "up")
        assert [each.result() for each in list(map(pool.submit, units))] == list(range(40))
