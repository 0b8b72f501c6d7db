"""`make test-tinker`: SkyRL's real server on CPUs (JAX), with the embedded policy in float32 as its base.

TURNTREE_TINKER is the virtual environment that the server runs in.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_server import VENV, Server, opened
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import Part
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.engine.checkpoint import load_model
from turntree.stages.config import Device, EpisodesCheckConfig, EvaluateConfig, TrainOnlineConfig
from turntree.stages.evaluate import evaluate
from turntree.stages.policy import load_policy
from turntree.stages.tinker import TinkerPolicy, get_adapter
from turntree.stages.train_online import run_train_online
from turntree.train.config import LoRAConfig, OnlineConfig, OptimizerConfig, ReinforcedConfig
from turntree.train.loss_config import LossConfig
from turntree.train.ranks import SINGLE

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(VENV is None, reason="TURNTREE_TINKER names no environment with SkyRL (make test-tinker)"),
    pytest.mark.timeout(3000),
    pytest.mark.filterwarnings("ignore"),  # of the SDK
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tinker")
    running = opened(folder)
    os.environ["TINKER_BASE_URL"] = running.url
    yield running
    running.kill()


CARRIER = Part("tinker", {"timeout": 900.0})


def device(**lora: Any) -> Device:
    return Device(carrier=CARRIER, lora=LoRAConfig(**lora) if lora else None)


def room(number: int) -> TurnState:
    text = f"You are in the middle of a room. You see a desk {number}, a shelf 1.\n\nYour task is to: put a mug in it."
    return TurnState(f"t{number}", 0, (Message("user", text),), Message("assistant", "go to shelf 1"))


def scored(model: Any, sequences: list[tuple[int, ...]]) -> list[list[float]]:
    found: list[list[float]] = []
    for ids in sequences:
        row = torch.tensor([ids])
        with torch.no_grad():
            scores = model(input_ids=row).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, row[0, 1:, None])[:, 0].tolist())
    return found


def most_off(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def test_log_probabilities_are_ours_and_seeds_decide_the_draws(server: Server) -> None:
    policy = load_policy(str(server.base), device())
    prompts = [policy.renderer.prompt(room(number).history) for number in range(2)]
    asked = [
        GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=12), seed=seed)
        for prompt in prompts
        for seed in range(4)
    ]
    found, again = policy.engine.generate(asked), policy.engine.generate(asked[::-1])[::-1]
    assert [one.token_ids for one in found] == [one.token_ids for one in again]
    model = load_model(server.base)
    rows = [request.prompt_ids + one.token_ids for request, one in zip(asked, found, strict=True)]
    ours = [row[-len(one.token_ids) :] for row, one in zip(scored(model, rows), found, strict=True)]
    off = most_off(ours, [list(one.logprobs) for one in found])
    print(f"log-probabilities of the sampler and ours differ by at most {off:.2g} nats")
    assert off < 1e-5


def grown(policy: Any) -> RolloutTree:
    """A branched group of two turns, with one rollout that was stopped."""
    draw, sampling = random.Random(0), Sampling(max_tokens=8)
    tree = RolloutTree("t")
    root = tree.add(None, NodeKind.PROMPT, policy.renderer.prompt(room(1).history)).id
    ids = {root: policy.renderer.prompt(room(1).history)}

    def turn(parent: int, seed: int) -> int:
        (done,) = policy.engine.generate([GenerationRequest(prompt_ids=ids[parent], sampling=sampling, seed=seed)])
        node = tree.add_completion(parent, done, Message("assistant", "")).id
        ids[node] = ids[parent] + done.token_ids
        return node

    for seed in range(3):
        first = turn(root, seed)
        seen = tuple(draw.randrange(20, 200) for _ in range(6))
        observed = tree.add(first, NodeKind.OBSERVATION, seen).id
        ids[observed] = ids[first] + seen
        for branch in range(2 if seed else 1):
            leaf = turn(observed, 10 * seed + branch + 5)
            tree.stop(leaf, StopReason.CANCELLED if (seed, branch) == (2, 1) else StopReason.COMPLETED)
    return tree


def test_an_adam_step_there_is_the_step_here(server: Server, tmp_path: Path) -> None:
    """On a branched group with a censored leaf, from the same adapter: the log-probabilities of all rows afterwards."""
    policy = load_policy(str(server.base), device(rank=8, alpha=32))
    assert isinstance(policy, TinkerPolicy)
    loss = LossConfig(kl_coefficient=0.0, old_logprobs="engine")
    config = ReinforcedConfig(loss=loss, optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=float("inf")))
    tree = grown(policy)
    verdicts = {
        leaf: Verdict(None if tree.stop_reason(leaf) is StopReason.CANCELLED else float(number % 2), "")
        for number, leaf in enumerate(tree.leaves())
    }
    credit: Credit = loss.estimator(CreditConfig())(tree, Rewards(verdicts))
    learner = policy.trainee(False, SINGLE).learner(config, 4)
    print(f"the server divides by {learner.trainers.reduction}")
    policy.save(tmp_path / "start")
    get_adapter(tmp_path / "start", tmp_path / "here")
    ours = load_policy(str(tmp_path / "here"), Device())
    paths = [tuple(t for node in tree.path(leaf) for t in node.token_ids) for leaf in tree.leaves()]
    local = ours.trainee(True, SINGLE).learner(config, 4)
    before = scored(ours.model, paths)
    assert most_off(before, scored(load_model(server.base), paths)) < 1e-5, "a fresh adapter changes nothing"
    learner.learn([tree], [credit])
    local.learn([tree], [credit])
    after = scored(ours.model, paths)
    types = policy.adapter.session.sdk.types
    asked = [policy.adapter.publish().compute_logprobs(types.ModelInput.from_ints(list(path))) for path in paths]
    theirs = [[value for value in one.result() if value is not None] for one in asked]
    theirs = [one[-len(path) + 1 :] for one, path in zip(theirs, paths, strict=True)]
    moved, off = most_off(before, after), most_off(after, theirs)
    print(f"one step moved log-probabilities by up to {moved:.3g}; there and here differ by at most {off:.2g} nats")
    assert moved > 0.05 and off < 2e-3


def test_a_run_trains_there_dies_and_comes_back(server: Server, tmp_path: Path) -> None:
    config = TrainOnlineConfig(
        model=str(server.base),
        environment=Part("household"),
        count=8,
        check=EpisodesCheckConfig(tasks=4),
        device=device(),
        train=OnlineConfig(
            iterations=3,
            groups=2,
            group_size=4,
            max_live_rollouts=8,
            max_turns=4,
            sampling=Sampling(max_tokens=16),
            optimizer=OptimizerConfig(learning_rate=3e-3),
        ),
        checkpoints=replace(TrainOnlineConfig().checkpoints, every=1),
    )
    started = time.monotonic()
    result = run_train_online(config, tmp_path / "run")
    print(f"three iterations of 8 episodes in {time.monotonic() - started:.0f} s")
    assert result["iterations"] == 3
    server.kill()
    server.start()
    played = evaluate(
        EvaluateConfig(
            model=str(tmp_path / "run" / "model"),
            environment=Part("household"),
            count=4,
            max_turns=4,
            max_tokens=16,
            device=device(),
        )
    )
    assert played["sampled"]["censored"] == 0
