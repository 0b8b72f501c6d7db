"""The laws of merging: what was sampled is in the tree as it was sampled, and a session counts once."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sessions import SYSTEM, Agent, Ids, sequence_of, sessions

from packed_gradient import gradient, library_gradient
from tiny_models import tiny_model
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import RolloutTree, StopReason
from turntree.credit.comparisons import (
    AcrossAnchors,
    Comparison,
    across_siblings,
    across_starts,
    rloo,
)
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted
from turntree.gateway.calls import Session
from turntree.gateway.merge import Merged, merge
from turntree.logs.rollouts import group_from_tree
from turntree.logs.trees import KeptTree
from turntree.pack.packing import flat_batches, pack
from turntree.report.browser import group_view
from turntree.rollout.accounting import account
from turntree.train.losses import LossConfig

draws = st.randoms(use_true_random=False)


def merged(made: list[Session]) -> Merged:
    return merge("task", made)


def sampled_tokens(session: Session) -> int:
    return sum(len(call.completion.token_ids) for call in session.calls if call.completion is not None)


@given(draws)
@settings(max_examples=60, deadline=None)
def test_the_path_to_every_completion_is_what_the_engine_saw_and_sampled(draw: random.Random) -> None:
    made = sessions(draw)
    found = merged(made)
    kept = [(one.session_id, call) for one in made for call in one.calls if call.completion is not None]
    assert sum(node.sampled for node in found.tree) == len(kept) == len(found.nodes)
    for session_id, call in kept:
        node = found.nodes[session_id, call.call_id]
        path = found.tree.path(node)
        assert tuple(token for part in path for token in part.token_ids) == sequence_of(call)
        assert path[-1].logprobs == call.completion.logprobs
    spent = sum(
        (call.cost if call.completion is None else call.completion.cost for s in made for call in s.calls), NO_COST
    )
    assert found.tree.cost == spent


@given(draws)
@settings(max_examples=40, deadline=None)
def test_a_session_is_one_rollout_that_owns_its_sampled_tokens(draw: random.Random) -> None:
    made = sessions(draw)
    found = merged(made)
    assert set(found.rewards.verdicts) == set(found.tree.ends()) == set(found.ends.values())
    for session in made:
        end = found.ends[session.session_id]
        owned = [node for node in found.tree.nodes_of(end) if found.tree[node].sampled]
        assert sorted(owned) == sorted(node for (name, _), node in found.nodes.items() if name == session.session_id)
        assert found.rewards.of(end) == session.reward
    assert len(group_from_tree(found.tree, found.rewards, id="1").rollouts) == len(made)
    assert account(found.tree).leaves == len(made)


@given(draws)
@settings(max_examples=40, deadline=None)
def test_a_session_weighs_one_whatever_its_branches(draw: random.Random) -> None:
    """Every sampled token of a scored session counts once, or, per rollout, all of them 1 together."""
    made = sessions(draw)
    found = merged(made)
    scored = [session for session in made if session.reward is not None]
    for per_rollout in (False, True):
        credit = CreditRule(per_rollout=per_rollout)(found.tree, found.rewards)
        assert credit.rollouts == len(scored)
        assert credit.censored == len(made) - len(scored)
        assert math.isclose(credit.rollout_tokens, sum(map(sampled_tokens, scored)))
        for session in scored:
            mine = [n for n in found.tree.nodes_of(found.ends[session.session_id]) if n in credit.nodes]
            weights = {node: credit.nodes[node].multiplicity for node in mine}
            together = sum(weight * len(found.tree[node].token_ids) for node, weight in weights.items())
            assert math.isclose(together, 1.0 if per_rollout else sampled_tokens(session))
            assert len({round(weight, 12) for weight in weights.values()}) == 1


def test_forty_calls_of_sub_agents_change_no_other_session() -> None:
    """The baseline and the weights of the others are those of a group in which the session had asked no one."""
    draw = random.Random(3)

    def group(helpers: int) -> tuple[Merged, list[int]]:
        made: list[Session] = []
        for sample, reward in enumerate((1.0, 0.0, 0.0)):
            agent = Agent(f"s{sample}", random.Random(sample))
            first = agent.ask((*SYSTEM, 7), "start")
            for _ in range(helpers if sample == 0 else 0):
                agent.ask((9, draw.randrange(2, 9)), "start")
            agent.ask((*sequence_of(first), 4), "continue")
            made.append(agent.session(reward, sample))
        found = merged(made)
        return found, [found.nodes[f"s{i}", f"s{i}.{len(made[i].calls) - 1}"] for i in range(3)]

    alone, with_helpers = group(0), group(40)
    credits = [CreditRule(advantages=rloo)(found.tree, found.rewards) for found, _ in (alone, with_helpers)]
    assert [credits[0].nodes[n] for n in alone[1]] == [credits[1].nodes[n] for n in with_helpers[1]]
    assert credits[0].rollouts == credits[1].rollouts == 3


# shapes


def agent_with_everything(name: str = "s0", shift: int = 0) -> Agent:
    """A retry, three answers to one prompt, a sub-agent, a compaction and a fault in one session."""
    agent = Agent(name, random.Random(shift))
    task = (*SYSTEM, 4)
    agent.ask(task, "start")  # 0: invalid, asked again
    first = agent.ask(task, "retry")  # 1
    second = (*sequence_of(first), 5)
    several = [agent.ask(second, "retry") for _ in range(3)]  # 2, 3, 4
    agent.ask((*SYSTEM, 8, 8), "start")  # 5: a sub-agent
    agent.fail((*sequence_of(several[1]), 6), "continue")  # 6
    third = agent.ask((*sequence_of(several[1]), 6), "continue")  # 7
    agent.ask((*third.prompt_ids[:6], 9, 9, 9), "compaction")  # 8: the end
    return agent


def forks(tree: RolloutTree) -> list[tuple[str, float]]:
    return [(said.reason, said.numbers["call"]) for said in tree.decisions if said.action == "fork"]


def test_retries_sub_agents_and_compactions_are_branches_with_their_causes() -> None:
    agent = agent_with_everything()
    found = merged([agent.session(1.0)])
    tree, node = found.tree, {call: found.nodes["s0", f"s0.{call}"] for call in (0, 1, 2, 3, 4, 5, 7, 8)}
    above = {call: tree.path(at)[-2].id for call, at in node.items()}
    assert above[0] == above[1]
    assert above[2] == above[3] == above[4] and tree[above[2]].parent == node[1]
    assert tree[above[7]].parent == node[3]
    assert tree[above[5]].parent is None and above[5] != above[0]
    said = [("retry", 1), ("retry", 2), ("retry", 3), ("retry", 4), ("another conversation", 5)]
    assert forks(tree) == [*said, ("compaction", 8)]
    assert found.ends == {"s0": node[8]}
    assert set(tree.parts()) == {leaf for leaf in tree.leaves() if leaf != node[8]}
    assert all(tree.stop_reason(leaf) is StopReason.CONTINUED for leaf in tree.parts())


def test_a_second_continuation_of_one_answer_is_a_fork_with_its_cause() -> None:
    agent = Agent("s0", random.Random(0))
    first = agent.ask((*SYSTEM, 4), "start")
    for token in (5, 6):
        agent.ask((*sequence_of(first), token), "continue")
    assert forks(merged([agent.session(1.0)]).tree) == [("another continuation", 2)]


def test_what_no_reward_can_reach_is_censored_and_counted() -> None:
    killed = agent_with_everything("s1", 1)
    silent, broken = Agent("s2", random.Random(0)), Agent("s3", random.Random(0))
    broken.fail(SYSTEM, "start")
    made = [agent_with_everything().session(1.0), killed.session(None, 1, "the agent was killed (signal 9)")]
    found = merged([*made, silent.session(1.0, 2), broken.session(0.0, 3)])
    assert found.unattributed == {
        "the session holds no model call that was answered": 2,
        "the agent was killed (signal 9)": 1,
    }
    assert found.rewards.scored() == {found.ends["s0"]: 1.0}
    credit = CreditRule()(found.tree, found.rewards)
    assert not {node for (name, _), node in found.nodes.items() if name != "s0"} & set(credit.nodes)


def test_a_call_with_a_reward_of_its_own_is_worth_that_and_moves_no_baseline() -> None:
    def credit(call_rewards: dict[str, float]) -> tuple[Merged, Credit]:
        made = [agent_with_everything(f"s{i}", i).session(float(i == 0), i) for i in range(3)]
        made[0] = Session(**{**vars(made[0]), "call_rewards": call_rewards})
        found = merged(made)
        return found, CreditRule(advantages=rloo)(found.tree, found.rewards)

    (found, plain), (_, judged) = credit({}), credit({"s0.2": 0.0, "s0.99": 1.0})
    loser = found.nodes["s0", "s0.2"]
    assert plain.nodes[loser] == NodeCredit(1.0, 0.0, 1.0)
    assert judged.nodes[loser] == NodeCredit(0.0, 0.0, 1.0)  # as good as the others' mean, which is 0
    assert {n: c for n, c in judged.nodes.items() if n != loser} == {n: c for n, c in plain.nodes.items() if n != loser}
    assert judged.rollouts == plain.rollouts == 3
    assert credit({"s0.99": 1.0})[0].unattributed == {"a reward of a call that the session does not hold": 1}


def test_equal_sessions_have_a_gradient_where_calls_were_judged_apart() -> None:
    made = [agent_with_everything(f"s{i}", i).session(1.0, i) for i in range(2)]
    made[0] = Session(**{**vars(made[0]), "call_rewards": {"s0.2": 0.0}})
    found = merged(made)
    credit = CreditRule(advantages=rloo)(found.tree, found.rewards)
    assert credit.nodes[found.nodes["s0", "s0.2"]] == NodeCredit(0.0, -1.0, 1.0)
    assert not credit.zero_variance


def test_sessions_share_the_task_and_nothing_that_was_sampled() -> None:
    agents = [Agent(f"s{i}", random.Random(0)) for i in range(2)]  # the same draws: equal tokens throughout
    for agent in agents:
        first = agent.ask((*SYSTEM, 4), "start")
        agent.ask((*sequence_of(first), 5), "continue")
    found = merged([agent.session(1.0, i) for i, agent in enumerate(agents)])
    assert len(found.tree.roots) == 1 and len(found.tree.starts()) == 2
    assert {node.id for node in found.tree.path(found.ends["s0"])} & set(found.tree.nodes_of(found.ends["s1"])) == {0}


def test_a_merged_tree_is_kept_on_disk_with_its_parts() -> None:
    found = merged([agent_with_everything().session(1.0), agent_with_everything("s1", 1).session(0.0, 1)])
    credit = CreditRule()(found.tree, found.rewards)
    kept = KeptTree(id="1", iteration=1, tree=found.tree, rewards=found.rewards, credit=credit)
    again = KeptTree.from_json(kept.to_json())
    assert again.tree.parts() == found.tree.parts() and again.credit == credit
    assert len(again.group().rollouts) == 2
    view = group_view(again)["nodes"]
    assert [row["end"]["reward"] for row in view if "end" in row] == [1.0, 0.0]
    assert sum("end" in row for row in view) == 2 and sum("part" in row for row in view) == len(found.tree.parts())


# refusals


@pytest.mark.parametrize("comparison", [across_starts, across_siblings, AcrossAnchors()])
def test_comparisons_that_read_forks_as_the_samplers_are_refused(comparison: Comparison) -> None:
    found = merged([agent_with_everything().session(1.0), agent_with_everything("s1", 1).session(0.0, 1)])
    with pytest.raises(ConfigError, match="branches that were not drawn"):
        CreditRule(comparison=comparison, advantages=rloo)(found.tree, found.rewards)


def test_path_weights_are_refused() -> None:
    found = merged([agent_with_everything().session(1.0)])
    with pytest.raises(ConfigError, match="leaf_weights"):
        CreditRule(leaf_weights=path_weighted)(found.tree, found.rewards)


def test_a_session_of_another_task_or_twice_is_refused() -> None:
    session = agent_with_everything().session(1.0)
    with pytest.raises(InputError, match="is of task 'task', not 'other'"):
        merge("other", [session])
    with pytest.raises(InputError, match="occurs twice"):
        merge("task", [session, session])


# the objective


def sampler(model: torch.nn.Module):
    """Tokens with log-probabilities around the model's, so that ratios fall on both sides of the clip range."""

    def sample(prompt: Ids, draw: random.Random) -> tuple[Ids, tuple[float, ...]]:
        sampled = tuple(draw.randrange(2, 9) for _ in range(draw.randint(1, 3)))
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=torch.tensor([prompt + sampled])).logits[0], -1)
        own = range(len(prompt), len(prompt) + len(sampled))
        return sampled, tuple(float(scores[t - 1, (prompt + sampled)[t]]) + draw.gauss(0, 0.3) for t in own)

    return sample


def group_advantages(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [0.0 if is_zero_variance(rewards) else (r - mean) / (std + 1e-6) for r in rewards]


def one_row_a_call(model: torch.nn.Module, made: list[Session], config: LossConfig) -> torch.Tensor:
    """The objective as if every call were a sample of its own with the advantage of its session, which is compared
    once: nothing of `turntree.train`, no tree, no prefix shared."""
    scored = [session for session in made if session.reward is not None]
    advantages = group_advantages([session.reward for session in scored if session.reward is not None])
    total = torch.tensor(0.0, dtype=torch.float64)
    for session, advantage in zip(scored, advantages, strict=True):
        objective = torch.tensor(0.0, dtype=torch.float64)
        for call in session.calls:
            if call.completion is None:
                continue
            row, start = torch.tensor([sequence_of(call)]), len(call.prompt_ids)
            scores = torch.log_softmax(model(input_ids=row).logits[0], -1)
            new = scores[torch.arange(start - 1, row.shape[1] - 1), row[0, start:]]
            ratio = torch.exp(new - torch.tensor(call.completion.logprobs, dtype=torch.float64))
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            objective = objective + torch.min(ratio * advantage, clipped * advantage).sum()
        total = total - (objective / sampled_tokens(session) if config.normalizer == "rollouts" else objective)
    z = {"tokens": sum(map(sampled_tokens, scored)), "rollouts": len(scored), "constant": config.constant}
    return total / z[config.normalizer]


@pytest.mark.parametrize("normalizer", ["tokens", "rollouts", "constant"])
@pytest.mark.parametrize("seed", range(5))
def test_packed_equals_flattened_equals_one_row_a_call(seed: int, normalizer: str) -> None:
    model, draw = copy.deepcopy(MODEL), random.Random(seed)
    made = sessions(draw, sampler(model))
    while is_zero_variance([session.reward for session in made if session.reward is not None]):
        made = sessions(draw, sampler(model))
    constant = 7.0 if normalizer == "constant" else None
    config = LossConfig(normalizer=normalizer, constant=constant, kl_coefficient=0.0, clip_low=0.2, clip_high=0.28)  # pyright: ignore[reportArgumentType]
    expected = one_row_a_call(model, made, config)
    expected.backward()
    wanted = gradient(model)
    found = merged(made)
    credit = config.estimator(CreditConfig())(found.tree, found.rewards)
    for batches in (
        pack([found.tree], [credit], max_tokens=4096),
        flat_batches([found.tree], [credit], max_tokens=4096),
    ):
        total, got = library_gradient(model, None, batches, config)
        assert total == pytest.approx(float(expected.detach()), abs=1e-6)
        assert float((got - wanted).norm()) <= 1e-6 * float(wanted.norm())


MODEL = tiny_model(vocab_size=12, hidden_size=16, layers=1, dtype=torch.float64)
