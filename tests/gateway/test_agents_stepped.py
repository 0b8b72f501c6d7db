"""Gates and branching of agents that drive themselves: the client of an agent is cut, and its fork is played again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_world import engine, renderer, spelled, tokenizer

from packed_gradient import library_gradient
from rollout_view import rollout_of
from tiny_models import tiny_model
from turntree.core.completion import Sampling
from turntree.core.labels import Rewards
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment, Gate, GateDecision, GroupProgress
from turntree.core.tree import Node, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.env.tasks import TRAIN
from turntree.gateway.environment import AgentTasks
from turntree.pack.packing import flat_batches, pack
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import player_of
from turntree.rollout.scheduler import SchedulerConfig
from turntree.train.losses import LossConfig

AGENT = """
import json, os, sys
import openai

client, task = openai.OpenAI(), json.load(open(os.environ["TURNTREE_TASK"]))
messages = [{"role": "user", "content": f"Where is the {task['thing']}?"}]
try:
    for turn in range(task["turns"]):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        note = os.getpid() if task.get("drawn") else turn
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"not there ({note})"}]
        if task.get("forgets") and turn == 1:
            messages = messages[-1:]
except openai.PermissionDeniedError as error:
    with open(task["heard"], "a") as file:
        file.write(f"{error.body['code']}\\n")
    sys.exit(3)
print(1.0 if "3" in said else 0.0)
"""


class CutAt(Gate):
    """Cuts every group at a turn."""

    def __init__(self, turn: int) -> None:
        self.turn, self.seen = turn, list[GroupProgress]()

    def decide(self, group: GroupProgress) -> GateDecision | None:
        self.seen.append(group)
        reached = len(group.actions[0]) >= self.turn
        return GateDecision(cut=True, reason="enough", numbers={}, final=True) if reached else None


class ForkAt(Brancher):
    """Forks the first rollout at a turn, behind the first `shared` tokens of it."""

    splits_turns = True

    def __init__(self, turn: int, shared: int) -> None:
        self.turn, self.shared = turn, shared

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if moment.turn != self.turn or moment.budget < 1:
            return None
        return BranchDecision(branches=2, reason="here", numbers={}, shared=self.shared)


def said(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    return spelled(f"place {(sum(prompt) + seed) % 4}")


def played(folder: Path, row: dict[str, Any], *, size: int = 2, initial: int | None = None, **more: Any) -> GrownGroup:
    (folder / "agent.py").write_text(AGENT)
    heard = str(folder / "heard")
    rows = [{"thing": "mug", "turns": 3, "heard": heard, "number": number, **row} for number in range(9)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = SchedulerConfig(
        group_size=size,
        initial_rollouts=initial,
        refills=False,
        max_retries=0,
        episodes=EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=40)),
    )
    command = f"{sys.executable} {folder / 'agent.py'}"
    with AgentTasks(argument=command, tasks=str(folder / "tasks.jsonl")).open({TRAIN: 1}, seed=0) as opened:
        tasks = opened.tasks[TRAIN]
        [group] = player_of(tasks, engine(said), renderer(), config, **more).run(tasks, seed=0)
    return group


def paths(group: GrownGroup) -> list[Any]:
    tree = group.tree
    return sorted(
        ([(node.kind, node.token_ids, node.logprobs) for node in tree.path(end) if told(tree, node)], verdict.reward)
        for end, verdict in group.rewards.verdicts.items()
    )


def told(tree: RolloutTree, node: Node) -> bool:
    """All but the last answer of an environment, of which an agent hears nothing."""
    return node.sampled or bool(tree.children(node.id))


class Never(Gate):
    def decide(self, group: GroupProgress) -> GateDecision | None:
        return None


def test_an_agent_that_is_stepped_has_the_draws_and_rewards_of_one_that_drives_itself(tmp_path: Path) -> None:
    alone, stepped = played(tmp_path, {}), played(tmp_path, {}, gate=Never())
    assert paths(stepped) == paths(alone)
    assert set(map(stepped.tree.stop_reason, stepped.tree.leaves())) == {StopReason.COMPLETED}


def test_the_agents_of_a_cut_group_read_that_it_is_over_and_have_no_reward(tmp_path: Path) -> None:
    gate = CutAt(2)
    group = played(tmp_path, {}, gate=gate)
    assert group.cut == 2
    assert {group.tree.stop_reason(leaf) for leaf in group.tree.leaves()} == {StopReason.GATED}
    assert all(verdict.reward is None for verdict in group.rewards.verdicts.values())
    assert max(node.turn for node in group.tree) == 2
    assert [len(actions) for actions in gate.seen[-1].actions] == [2, 2]
    assert (tmp_path / "heard").read_text().split() == ["session_over"] * 2


@pytest.mark.parametrize("shared", [0, 3])
def test_a_fork_is_a_new_agent_that_is_told_again_what_the_first_was(tmp_path: Path, shared: int) -> None:
    group = played(tmp_path, {}, initial=1, brancher=ForkAt(2, shared))
    tree = group.tree
    assert len(tree.ends()) == 2 and len(tree.starts()) == 1 and len(tree.branch_points()) == 1
    one, other = (rollout_of(tree, end) for end in tree.ends())
    assert {one.stop, other.stop} == {StopReason.COMPLETED}
    [fork] = [decision for decision in tree.decisions if decision.action == "fork"]
    above = sum(len(node.token_ids) for node in tree.path(fork.node))
    assert one.token_ids[:above] == other.token_ids[:above]
    assert all(verdict.reward in (0.0, 1.0) for verdict in group.rewards.verdicts.values())
    assert tree.cost.tool_calls >= 4  # the replayed turn is paid for
    rewards = Rewards({end: Verdict(float(number), "by number") for number, end in enumerate(tree.ends())})
    model, config = (
        tiny_model(vocab_size=len(tokenizer()), layers=1, dtype=torch.float64),
        LossConfig(kl_coefficient=0.0),
    )
    credit = config.estimator(CreditConfig())(tree, rewards)
    (packed_loss, packed), (flat_loss, flat) = (
        library_gradient(model, None, batches([tree], [credit], max_tokens=4096), config)
        for batches in (pack, flat_batches)
    )
    assert packed_loss == pytest.approx(flat_loss, abs=1e-9)
    assert float((packed - flat).norm()) <= 1e-6 * float(flat.norm()) and float(flat.norm()) > 0


def test_a_fork_of_an_agent_that_says_something_else_is_refused_with_the_reason(tmp_path: Path) -> None:
    group = played(tmp_path, {"drawn": True}, initial=1, brancher=ForkAt(2, 0))
    incumbent, fork = (group.rewards.verdicts[end] for end in group.tree.ends())
    assert incumbent.reward is not None
    assert fork.reward is None and "replay" in fork.reason


def test_an_agent_that_rewrites_its_history_is_censored_for_that_reason(tmp_path: Path) -> None:
    group = played(tmp_path, {"forgets": True}, gate=Never())
    assert {group.tree.stop_reason(leaf) for leaf in group.tree.leaves()} == {StopReason.ENVIRONMENT_ERROR}
    assert all("conversation" in verdict.reason for verdict in group.rewards.verdicts.values())


LOSES = """
import json, os
import openai

client, task = openai.OpenAI(), json.load(open(os.environ["TURNTREE_TASK"]))
first, again = (client.responses.create(model="policy", input="hi") for _ in range(2))  # the first answer was lost
more = {"model": "policy", "input": "more", "previous_response_id": again.id}
later, repeated = (client.responses.create(**more) for _ in range(2))
assert (first.id, later.id) == (again.id, repeated.id) and first.id != later.id
assert later.output_text == repeated.output_text
print(json.dumps({"reward": 1.0, "call_rewards": {later.id: 0.5}} if task.get("rewards") else 1.0))
"""


def test_a_request_that_is_repeated_is_the_call_whose_answer_was_lost(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "AGENT", LOSES)
    group = played(tmp_path, {}, gate=Never())
    assert [verdict.reward for verdict in group.rewards.verdicts.values()] == [1.0, 1.0]
    assert max(node.turn for node in group.tree) == 2


def test_rewards_of_calls_are_not_lost_in_silence_where_an_agent_is_stepped(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "AGENT", LOSES)
    group = played(tmp_path, {"rewards": True}, gate=Never())
    assert {verdict.reward for verdict in group.rewards.verdicts.values()} == {None}
    assert all("call_rewards" in verdict.reason for verdict in group.rewards.verdicts.values())
