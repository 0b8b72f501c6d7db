"""Stages on a Ray cluster of two nodes give what they give in one process, whoever dies on the way."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_pool import InlinePool

from fake_vllm import FakeVllm, running
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.engine.checkpoint import load_model
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.pool import WorkerPool
from turntree.stages import train_online, train_pivot, workers
from turntree.stages.config import CheckConfig, Device, EpisodesCheckConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.policy import resolve
from turntree.stages.profile import ProfileStageConfig, run_profile
from turntree.stages.select import run_select
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.checkpoints import CheckpointConfig
from turntree.train.config import LoRAConfig
from turntree.train.online import OnlineConfig
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.pivot import PivotConfig

pytestmark = pytest.mark.usefixtures("two_nodes")
CACHES = {"prefilled_tokens", "reused_tokens"}
TWO = WorkersConfig(workers=2, cpus=0.5)
COMMAND = Sampling(max_tokens=24)
FAST = OptimizerConfig(learning_rate=1e-4)  # AdamW turns rounding of a small gradient into a share of this
ONLINE = TrainOnlineConfig(
    environment=Part("chatter:tasks"),
    model="household",
    count=4,
    check=EpisodesCheckConfig(tasks=1),
    train=OnlineConfig(
        iterations=3,
        groups=4,
        check_every=0,
        optimizer=FAST,
        group_size=4,
        initial_rollouts=2,
        max_turns=3,
        sampling=Sampling(max_tokens=12),
        cut_turns="judge",
    ),
    brancher=Part("entropy", {"probe_tokens": 2}),  # paced: it learns from what the workers' branchers saw
    gate=Part("divergence", {"turn": 2, "threshold": 0.5, "audit": 0.5}),
    checkpoints=CheckpointConfig(every=1),
)


def artifacts(folder: Path) -> dict[str, list[Any]]:
    return {path.name: rows_of(path) for path in sorted(folder.glob("*.jsonl"))}


def rows_of(path: Path) -> list[Any]:
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()]


def versions(run: Path) -> list[set[int]]:
    """By iteration: the versions of the policy that its tokens were sampled with."""
    found: dict[int, set[int]] = {}
    for row in artifacts(run)["trees.jsonl"]:
        sampled = {node["policy_version"] for node in row["tree"]["nodes"] if "policy_version" in node}
        found.setdefault(row["iteration"], set()).update(sampled)
    return [found[iteration] for iteration in sorted(found)]


def updates_before(run: Path) -> list[int]:
    """By iteration: the updates before it."""
    trained = [row["trained_groups"] > 0 for row in artifacts(run)["metrics.jsonl"] if row["step"]]
    return [sum(trained[:number]) for number in range(len(trained))]


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: timeless(each) for key, each in value.items() if key != "timing"}


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Where two JSON values differ by more than rounding, apart from how prompts came to be in a cache."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() - CACHES == other.keys() - CACHES:
        for key in one.keys() - CACHES:
            yield from differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif isinstance(one, float) and isinstance(other, float):
        # of single tokens, by kernels over batches of another shape
        single = place.startswith(".trees.jsonl") or place.endswith(".ratio_max")
        if abs(one - other) > (1e-4 if single else 1e-5) * max(1.0, abs(one)):
            yield f"{place}: {one} {other}"
    elif one != other:
        yield f"{place}: {str(one)[:60]} {str(other)[:60]}"


def caught(monkeypatch: pytest.MonkeyPatch, stage: Any) -> list[WorkerPool]:
    """The pools that the stage opens from now on."""
    pools: list[WorkerPool] = []
    opened = stage.open_crew

    @contextmanager
    def catching(*arguments: Any, **settings: Any) -> Iterator[WorkerPool]:
        with opened(*arguments, **settings) as pool:
            pools.append(pool)
            yield pool

    monkeypatch.setattr(stage, "open_crew", catching)
    return pools


def first_gradients(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The gradient of the first step of every run from now on, clipped: AdamW's first moment is a share of it."""
    found: list[torch.Tensor] = []
    step = Optimizer.step

    def watched(optimizer: Optimizer) -> dict[str, float]:
        said = step(optimizer)
        if optimizer.steps == 1:
            names = [str(number) for number, _ in enumerate(optimizer.masters)]
            held = optimizer.tensors(names)
            found.append(torch.cat([held[f"exp_avg.{name}"].flatten().clone() for name in names]))
        return said

    monkeypatch.setattr(Optimizer, "step", watched)
    return found


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Do `act` between the rollouts and the update of step `number` of every run from now on."""
    step = Optimizer.step

    def watched(optimizer: Optimizer) -> dict[str, float]:
        if optimizer.steps == number - 1:
            act()
        return step(optimizer)

    monkeypatch.setattr(Optimizer, "step", watched)


def until(true: Callable[[], bool], problem: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, problem
        time.sleep(0.02)


def busy() -> list[int]:
    """Workers that play a unit, by the title that Ray gives their processes then."""
    found: list[int] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [int(line.parent.name)] if line.read_bytes().startswith(b"ray::Worker.play") else []
    return found


@contextmanager
def meanwhile(ready: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do `act` once `ready`, while the block runs; the block must not end before."""
    done = threading.Event()

    def watch() -> None:
        while not ready():
            time.sleep(0.02)
        act()
        done.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    assert done.is_set()


def test_online_training_is_the_same_on_workers_of_which_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = first_gradients(monkeypatch)
    run_train_online(ONLINE, tmp_path / "here")
    with monkeypatch.context() as patch:
        patch.setattr(workers, "WorkerPool", InlinePool)
        run_train_online(replace(ONLINE, cluster=TWO), tmp_path / "one")
    pools, rows = caught(monkeypatch, train_online), tmp_path / "two" / "metrics.jsonl"

    def kill() -> None:
        while not (found := busy()):
            time.sleep(0.01)
        os.kill(found[0], signal.SIGKILL)

    with meanwhile(lambda: rows.exists() and bool(rows.read_text()), kill):
        run_train_online(replace(ONLINE, cluster=TWO), tmp_path / "two")
    assert pools[0].lost == 1
    here, one, two = (artifacts(tmp_path / name) for name in ("here", "one", "two"))
    assert two == one, "the same bits, whatever the number of workers, and whoever dies"
    assert list(differences(here, two)) == []
    alone, beside, spread = gradients
    assert torch.equal(beside, spread) and float((spread - alone).norm() / alone.norm()) < 1e-5 < float(alone.norm())
    assert {tree["iteration"] for tree in two["trees.jsonl"]} == {1, 2, 3}
    assert len(two["trees.jsonl"]) == 12, "every task is trained exactly once"
    assert all(row["trained_groups"] and row["loss"] for row in two["metrics.jsonl"] if row["step"])
    assert any(node for row in two["trees.jsonl"] for node in row["tree"]["decisions"] if node["action"] == "fork")


@pytest.mark.parametrize("rank, steps", [(0, 0), (4, 1)], ids=["whole weights", "adapters, one step ahead"])
def test_workers_share_servers_that_the_command_gave_each_version_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, steps: int
) -> None:
    """The command sends each version to the servers, where `steps` earlier ones stay for the workers, which hold no
    model: the same bits from one worker at one server and two at two, one of which loses a third of its connections."""
    monkeypatch.setattr(workers, "load_policy", None)  # a worker that loads the policy fails
    train = replace(ONLINE.train, iterations=3, groups=2, max_off_policy_steps=steps)
    asked = itertools.count()
    for name, count in {"one": 1, "two": 2}.items():
        fakes = [FakeVllm(load_model(resolve("household"))) for _ in range(count)]
        with ExitStack() as stack, monkeypatch.context() as patch:
            if count == 1:
                patch.setattr(workers, "WorkerPool", InlinePool)
            else:
                # probes, of 8 tokens, are answered: a server that drops them too is lost, which only takes longer
                fakes[1].hook = lambda _, b: "drop" if b.get("max_tokens", 0) > 8 and not next(asked) % 3 else None
            url = ",".join(stack.enter_context(running(fake)) for fake in fakes)
            device = Device(lora=LoRAConfig(rank=rank) if rank else None, engine=Part("vllm", {"url": url}))
            settings = replace(ONLINE, device=device, train=train, cluster=replace(TWO, workers=count))
            run_train_online(settings, tmp_path / name)
        for fake in fakes:
            names = [body["lora_name"] for body in fake.of("/v1/load_lora_adapter")]
            names += [body["kwargs"]["weights_path"] for body in fake.of("/collective_rpc")]
            assert len(names) == len({*names}) > 1, "a version is sent once, by the command"
            assert len(fake.adapters) <= 1 + steps, "those that no worker samples from are unloaded"
    one, two = (artifacts(tmp_path / name) for name in ("one", "two"))
    assert two == one
    done = updates_before(tmp_path / "one")
    assert versions(tmp_path / "one") == [{done[max(0, number - steps)]} for number in range(len(done))]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    demonstrate(Part("household", {"count": 6}), folder / "traces.jsonl")
    return folder / "traces.jsonl"


def profiling(traces: Path) -> ProfileStageConfig:
    profile = ProfileConfig(rollouts=4, sampling=COMMAND, wave=4)
    return ProfileStageConfig(traces=str(traces), limit=40, profile=profile)


def test_pivot_training_is_the_same_when_a_node_is_lost(
    two_nodes: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_profile(profiling(traces), tmp_path / "profile.jsonl")
    run_select(tmp_path / "profile.jsonl", SelectConfig(threshold=1.0, anchor_share=0.2), tmp_path / "pivots.jsonl")
    config = TrainPivotConfig(
        pivots=str(tmp_path / "pivots.jsonl"),
        train=PivotConfig(steps=8, groups=4, group_size=4, sampling=COMMAND, optimizer=FAST),  # it ends after the node
        check=CheckConfig(states=2, samples=2, tasks=0),
    )
    run_train_pivot(config, tmp_path / "here")
    monkeypatch.setattr(train_pivot, "_STATES", 1)
    pools = caught(monkeypatch, train_pivot)
    node = two_nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster = WorkersConfig(workers=3, cpus=1.0)  # one a node; of the last, none is left when its node is

    def lose() -> None:  # a node without a worker would not be missed: workers start while others play
        until(lambda: node.node_id in pools[0].living.values(), "no worker started on the third node")
        two_nodes.remove_node(node, allow_graceful=False)

    before_step(monkeypatch, 2, lose)
    run_train_pivot(replace(config, cluster=cluster), tmp_path / "two")
    here, two = artifacts(tmp_path / "here"), artifacts(tmp_path / "two")
    assert list(differences(here, two)) == []
    assert len(two["trees.jsonl"]) == 32, "every state is trained on exactly once"
    assert pools[0].lost >= 1
