"""Statements of the papers, each derived here by hand from the paper's own equation and not from our code: what the
pages of docs/papers.md call `works` is compared with it. No model: a policy is a table of logits by place and token."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

from group_progress import progress
from turntree.core.labels import Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.outcome import GroupOutcome, group_outcome, is_zero_variance
from turntree.core.protocols import FinishedGroup, ForkMoment, TurnState
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import grpo_advantages, mean_centred, rloo
from turntree.credit.config import CreditConfig
from turntree.decide.branching.rules import EntropyBrancher
from turntree.decide.filters.dapo import DapoFilter, refill
from turntree.decide.filters.greso import Greso
from turntree.decide.gates import signals
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.engine.sampling import draw
from turntree.pack.packing import PackedBatch, pack
from turntree.pivots.rows import class_of, moments
from turntree.pivots.select import SelectConfig, select
from turntree.pivots.summary import ProfileSummary
from turntree.rollout.accounting import account
from turntree.traces.candidates import candidates, rule_reason
from turntree.traces.schema import Trace
from turntree.train.losses import LossConfig, kl_estimates, loss_normalizer, policy_loss
from turntree.train.sampler import PivotSampler
from turntree.verify.paper import Paper
from turntree.verify.strict import StrictMatch
from turntree_worlds.qa.hierarchical import ExecutedCall, HierarchicalReward

TOKENS, DEEP = 7, 12  # of the table: vocabulary, and places of a path
PAPER_LOSS = LossConfig(kl_coefficient=0.0, ratio="action", normalizer="rollouts")
binary = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16)
tables = st.integers(0, 10**6).map(lambda seed: table(seed))
Path = tuple[tuple[int, ...], ...]  # the turns of a rollout, as token ids


def table(seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(DEEP, TOKENS, generator=drawn, dtype=torch.float64)


def logprob(theta: Tensor, place: int, tokens: Sequence[int]) -> Tensor:
    """Of `tokens` from `place` on, summed."""
    return sum(
        (torch.log_softmax(theta[place + i], -1)[token] for i, token in enumerate(tokens)), torch.zeros(()).double()
    )


def grown(paths: Sequence[Path], old: Tensor, rewards: Sequence[float | None]) -> tuple[RolloutTree, Rewards]:
    """Rollouts of one prompt of one token, one observation of one token after each turn but the last."""
    tree = RolloutTree("state")
    root = tree.add(None, NodeKind.PROMPT, (0,)).id
    verdicts: dict[int, Verdict] = {}
    for path, reward in zip(paths, rewards, strict=True):
        node, place = root, 0
        for number, turn in enumerate(path):
            if number:
                node, place = tree.add(node, NodeKind.OBSERVATION, (6,)).id, place + 1
            said = tuple(float(logprob(old, place + i, [token])) for i, token in enumerate(turn))
            node, place = tree.add(node, NodeKind.COMPLETION, turn, logprobs=said).id, place + len(turn)
        tree.stop(node, StopReason.COMPLETED)
        verdicts[node] = Verdict(reward, "given")
    return tree, Rewards(verdicts)


def library_loss(groups: Sequence[tuple[RolloutTree, Rewards]], theta: Tensor, config: LossConfig) -> Tensor:
    rule = config.estimator(CreditConfig())
    trees = [tree for tree, _ in groups]
    batches = pack(trees, [rule(tree, rewards) for tree, rewards in groups], max_tokens=512)
    normalizer = loss_normalizer(batches, config)
    return torch.stack([one_loss(batch, theta, config, normalizer) for batch in batches]).sum()


def one_loss(batch: PackedBatch, theta: Tensor, config: LossConfig, normalizer: float) -> Tensor:
    places = batch.positions_BL.flatten()[batch.predecessor_S]
    scores_S = torch.log_softmax(theta[places], -1).gather(-1, batch.target_S[:, None])[:, 0]
    old = dataclasses.replace(batch, old_logprobs_T=batch.sampling_logprobs_T)
    return policy_loss(scores_S, old, config, normalizer=normalizer)[0]


def alike(found: Tensor, wanted: Tensor, theta: Tensor) -> None:
    """Value and gradient."""
    gradients = [torch.autograd.grad(one, theta, retain_graph=True)[0] for one in (found, wanted)]
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-6)  # log-probabilities are float32
    assert torch.allclose(*gradients, atol=1e-6)


# PivotRL


@given(binary)
def test_pivotrl_eq_1_is_the_z_score_of_the_group_with_the_population_deviation(rewards: list[float]) -> None:
    values = np.array(rewards)
    assert np.allclose(grpo_advantages(rewards), (values - values.mean()) / (values.std() + 1e-6), atol=1e-12)


@given(st.sampled_from([0.0, 1.0]), st.integers(2, 16))
def test_pivotrl_proposition_3_1_equal_rewards_have_no_advantage_and_mixed_ones_have(reward: float, size: int) -> None:
    assert not any(grpo_advantages([reward] * size))
    assert all(grpo_advantages([reward] * size + [1 - reward]))


@settings(max_examples=25)
@given(tables, st.integers(0, 10**6), st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
def test_pivotrl_eq_7_and_8_are_the_loss_of_whole_actions(theta: Tensor, seed: int, rewards: list[float]) -> None:
    """1/G sum_i min(w_i A_i, clip(w_i, 1 - eps, 1 + eps) A_i), w_i = pi(a_i | s) / pi_old(a_i | s), in tokens of three
    actions of different length."""
    theta = theta.requires_grad_()
    old = theta.detach() + 0.2 * table(seed)  # ratios on both sides of the clip
    actions = [(1,), (2, 3), (4, 5, 1)]
    mean, deviation = np.mean(rewards), np.std(rewards)
    terms = []
    for action, reward in zip(actions, rewards, strict=True):
        w = (logprob(theta, 0, action) - logprob(old, 0, action)).exp()
        advantage = (reward - mean) / (deviation + 1e-6)
        terms.append(torch.minimum(w * advantage, w.clamp(0.8, 1.2) * advantage))
    wanted = -sum(terms, torch.zeros(()).double()) / 3
    group = grown([(action,) for action in actions], old, rewards)
    alike(library_loss([group], theta, PAPER_LOSS), wanted, theta)


@given(tables, st.integers(0, 10**6))
def test_pivotrl_the_kl_term_of_eq_7_has_the_gradient_of_kl_to_the_reference(theta: Tensor, seed: int) -> None:
    """E over tokens of pi of the term's gradient, enumerated, and the derivative of KL(pi || pi_0)."""
    theta = theta[0].requires_grad_()
    reference = torch.log_softmax(table(seed)[0], -1)
    log_pi = torch.log_softmax(theta, -1)
    expected = (log_pi.exp().detach() * kl_estimates(log_pi, reference, "k2")).sum()
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    assert torch.allclose(*(torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (expected, exact)))


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16), st.sampled_from([0.2, 0.5, 0.6, 1.0]))
def test_pivotrl_eq_4_and_5_mean_variance_and_which_turns_are_kept(rewards: list[float], threshold: float) -> None:
    p = sum(rewards) / len(rewards)
    assert moments(rewards) == pytest.approx((p, p * (1 - p)))  # of rewards 0 and 1
    assert (class_of(rewards, threshold) == "pivot") == (0 < p < threshold)


def profile_row(number: int, mean: float) -> dict:
    row = {"trace_id": f"t{number}", "turn": 0, "kind": f"k{number % 3}", "state": str(number), "demonstrated": "x"}
    return row | {"reward_mean": mean, "reward_var": mean * (1 - mean)}


@given(st.lists(st.sampled_from([k / 8 for k in range(9)]), min_size=1, max_size=20))
def test_pivotrl_the_paper_s_selection_is_d_adv_all_drawn_alike(means: list[float]) -> None:
    config = SelectConfig(threshold=0.6, max_per_kind=1.0, anchor_share=0.0, per_duplicate=0)
    found = select([profile_row(i, mean) for i, mean in enumerate(means)], config)
    assert [row["trace_id"] for row in found.rows] == [f"t{i}" for i, mean in enumerate(means) if 0 < mean < 0.6]
    assert all(row["weight"] == 1.0 for row in found.rows) and sum(found.counts.values()) == len(means)


def test_pivotrl_the_miss_rate_is_the_chance_that_an_accepted_action_is_not_the_demonstrated_text() -> None:
    """Pr[strict = 0 | func = 1]: of 8 rollouts, 3 are the demonstration, 2 another accepted action, 3 refused."""
    counted = [(3, 1.0, 1.0), (2, 1.0, 0.0), (3, 0.0, 0.0)]
    actions = [{"count": count, "reward": func, "strict": strict} for count, func, strict in counted]
    more = {"stop": "K reached", "rollouts": 8, "truncated": 0, "unjudged": 0, "faults": {}, "certainty": 1.0}
    summary = ProfileSummary(8, None)
    summary.add(profile_row(0, 5 / 8) | more | {"actions": actions, "cost": {}})
    assert summary.summary({})["miss_rate"] == pytest.approx(2 / 5)


def conversation(*said: Message) -> Trace:
    return Trace(id="t", messages=(Message("user", "Go."), *said))


def test_pivotrl_eq_3_every_assistant_turn_is_a_candidate_with_all_that_came_before_it() -> None:
    ask = Message("assistant", "", (ToolCall("look", {}, "1"),))
    answer, words = Message("tool", "a door", tool_call_id="1"), Message("assistant", "It is a door.")
    found = candidates(conversation(ask, answer, words))
    assert [state.demonstration for state in found] == [ask, words]  # words alone are an action too (A.1)
    assert [len(state.history) for state in found] == [1, 3]


@pytest.mark.parametrize(
    ("rule", "turn", "failed", "kept"),
    [
        ("turns", Message("assistant", "Hello"), False, True),  # tau2: natural language, tool calls, or both
        ("tool_calls", Message("assistant", "", (ToolCall("edit", {}),)), False, True),  # SWE: non-error tool calls
        ("tool_calls", Message("assistant", "", (ToolCall("edit", {}),)), True, False),
        ("tool_calls", Message("assistant", "Done."), False, False),
        ("bash", Message("assistant", "", (ToolCall("execute_bash", {}),)), True, True),  # Terminal: bash actions
        ("bash", Message("assistant", "", (ToolCall("edit", {}),)), False, False),
        ("search", Message("assistant", "", (ToolCall("web_search", {}),)), False, True),  # BrowseComp: search steps
        ("search", Message("assistant", "", (ToolCall("python", {}),)), False, False),
    ],
)
def test_pivotrl_a_2_which_turns_of_a_domain_are_candidates(rule, turn, failed, kept) -> None:
    assert (rule_reason(rule, turn, (), failed) is None) == kept


def test_pivotrl_eq_2_pays_the_demonstrated_action_and_nothing_else() -> None:
    gold = Message("assistant", "", (ToolCall("run", {"a": 1, "b": 2}, "1"),))
    others = [(ToolCall("run", {"a": 1}),), (ToolCall("walk", {"a": 1, "b": 2}),), (ToolCall("run", {"a": 1, "b": 2}),)]
    state = TurnState("t", 0, (), gold)
    rewards = [StrictMatch().judge(state, Message("assistant", "", calls)).reward for calls in others]
    assert rewards == [0.0, 0.0, 1.0]


def test_pivotrl_a_2_swe_is_paid_by_the_names_of_the_tools() -> None:
    gold, domain = Message("assistant", "", (ToolCall("execute_bash", {"command": "ls"}),)), Paper(domain="swe")
    tried = [ToolCall("execute_bash", {"command": "rm -rf /"}), ToolCall("edit", {"path": "a"})]
    state = TurnState("t", 0, (), gold)
    assert [domain.judge(state, Message("assistant", "", (one,))).reward for one in tried] == [1.0, 0.0]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_pivotrl_algorithm_1_line_6_draws_a_minibatch_of_the_retained_turns(size: int, count: int, seed: int) -> None:
    """Alike: in any whole number of epochs every turn was drawn equally often."""
    sampler = PivotSampler([1.0] * size, seed)
    drawn = Counter(itertools.chain.from_iterable(sampler.draw(count, step) for step in range(size)))
    assert set(drawn) <= set(range(size)) and sum(drawn.values()) == size * count
    assert set(drawn.values()) == {count} or size < count


# Selective Rollout


@settings(max_examples=25)
@given(tables, st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4))
def test_selective_rollout_c_2_the_loss_is_the_mean_over_trajectories_of_summed_log_probabilities(
    theta: Tensor, rewards: list[float]
) -> None:
    """-(1/N) sum_i A_i sum over action tokens of log p: two groups of two, rollouts of several turns whose observations
    are masked. On policy, where the ratio is 1, the gradients are equal."""
    theta = theta.requires_grad_()
    paths: list[Path] = [((1, 2), (3,)), ((4,), (5, 1))]
    groups = [grown(paths, theta.detach(), rewards[k : k + 2]) for k in (0, 2)]
    total = torch.zeros(()).double()
    for k in (0, 2):
        mean, deviation = np.mean(rewards[k : k + 2]), np.std(rewards[k : k + 2])
        for path, reward in zip(paths, rewards[k : k + 2], strict=True):
            said = logprob(theta, 0, path[0]) + logprob(theta, len(path[0]) + 1, path[1])
            total = total - (reward - mean) / (deviation + 1e-6) * said / 4
    found = library_loss(groups, theta, PAPER_LOSS)
    assert torch.allclose(*(torch.autograd.grad(one, theta)[0] for one in (found, total)), atol=1e-6)


@given(st.integers(0, 5), st.integers(1, 4))
def test_selective_rollout_4_4_groups_without_variance_shrink_the_gradient_by_their_share(flat: int, mixed: int):
    theta = table(3).requires_grad_()
    paths: list[Path] = [((1, 2), (3,)), ((4,), (5, 1))]
    useful = [grown(paths, theta.detach(), [1.0, 0.0]) for _ in range(mixed)]
    dead = [grown(paths, theta.detach(), [1.0, 1.0]) for _ in range(flat)]
    whole, kept = (torch.autograd.grad(library_loss(g, theta, PAPER_LOSS), theta)[0] for g in (useful + dead, useful))
    assert torch.allclose(whole, kept * mixed / (mixed + flat), atol=1e-9)


@given(st.lists(st.text("abc", min_size=4, max_size=4), min_size=2, max_size=5))
def test_selective_rollout_3_2_d_k_is_the_mean_pairwise_edit_distance_over_the_length(actions: list[str]) -> None:
    """Of rollouts that all reach turn K, where nothing is padded: the printed definition, by its recursion."""

    def distance(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))

    pairs = [distance(a, b) / 4 for a, b in itertools.combinations(actions, 2)]
    assert signals.prefix_edit_distance_mean(progress(*actions), 4) == pytest.approx(sum(pairs) / len(pairs))


def test_selective_rollout_appendix_b_the_other_signals_on_one_group() -> None:
    """Three rollouts of three actions, worked out by hand: bigrams {ab, bc}, {ab, bb}, {ab, bc}; prefixes abc, abb,
    abc; last actions c, b, c."""
    group = progress("abc", "abb", "abc")
    assert signals.action_bigram_jaccard_mean(group, 3) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert signals.unique_prefix_ratio(group, 3) == signals.unique_action_ratio(group, 3) == pytest.approx(2 / 3)
    shannon = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert signals.action_entropy(group, 3) * math.log(3) == pytest.approx(shannon)  # the released code divides


@given(st.integers(0, 6))
def test_selective_rollout_eq_2_and_3_cut_below_d_l_or_from_tau_h_on(same: int) -> None:
    """Seven rollouts still running, `same` of them say a at every turn and the others a letter of their own: d_K is the
    share of pairs that differ."""
    actions = ["a" * 8 if i < same else "bcdefgh"[i] * 8 for i in range(7)]
    pairs = list(itertools.combinations(actions, 2))
    d = sum(a != b for a, b in pairs) / len(pairs)
    for threshold in (d, d + 1e-9):
        decision = PrefixDivergenceGate(turn=8, threshold=threshold).decide(progress(*actions))
        assert decision is not None and decision.cut == (threshold > d)
    ended = progress(*("ab" for _ in range(9)), "abcdefgh", finished=range(9))
    loose = PrefixDivergenceGate(turn=8, threshold=0.0, termination=0.9).decide(ended)
    tight = PrefixDivergenceGate(turn=8, threshold=0.0, termination=0.91).decide(ended)
    assert loose is not None and loose.cut and tight is not None and not tight.cut  # tau_8 = 9/10


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8))
def test_selective_rollout_2_1_zero_variance_is_one_reward_and_has_one_of_three_labels(rewards: list[float]) -> None:
    assert is_zero_variance(rewards) == (np.var(rewards) == 0)
    label = {0: GroupOutcome.ALL_FAIL, len(rewards): GroupOutcome.ALL_SUCCEED}.get(int(sum(rewards)))
    assert group_outcome(rewards) is (label or GroupOutcome.MIXED)


def test_selective_rollout_3_5_a_mixed_group_weighs_the_root_of_its_size_whatever_its_rewards() -> None:
    """The squares of G z-scores add up to G. So 4 false cuts of 61 mixed groups keep sqrt(57/61) = 96.7% of |A|."""
    every = [grpo_advantages([1.0] * wins + [0.0] * (8 - wins), eps=0.0) for wins in range(1, 8)]
    assert [sum(a * a for a in group) for group in every] == pytest.approx([8.0] * 7)
    squares = [8.0] * 61
    assert round(100 * math.sqrt(sum(squares[4:]) / sum(squares)), 1) == 96.7


def test_selective_rollout_dapo_drops_exactly_the_groups_without_variance_and_fills_up_the_batch() -> None:
    rule = CreditConfig().rule("tokens", per_rollout=False)
    dropped = []
    for rewards in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0]):
        tree, scored = grown([((1,),), ((2,),)], table(0), rewards)
        group = FinishedGroup(task_id="t", iteration=0, rewards=tuple(rewards), credit=rule(tree, scored))
        dropped.append(DapoFilter().drop(group) is not None)
    assert dropped == [True, True, False]
    assert refill(2.0, wanted=8, kept=5, started=8) == 3


@given(st.integers(1, 12))
def test_selective_rollout_greso_skips_by_one_minus_p_to_the_number_of_equal_groups(times: int) -> None:
    greso = Greso()
    for _ in range(times):
        greso.record("t", [0.0, 0.0])
    assert greso.skip_probability("t") == pytest.approx(1 - max(0.5**times, 0.01))
    greso.record("t", [1.0, 0.0])
    assert greso.skip_probability("t") == 0.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_selective_rollout_appendix_a_rloo_leaves_one_out_and_dr_grpo_divides_by_nothing(rewards: list[float]) -> None:
    values = np.array(rewards)
    others = [(values.sum() - r) / (len(values) - 1) for r in values]
    assert np.allclose(rloo(rewards), values - others, atol=1e-7)
    assert np.allclose(mean_centred(rewards), values - values.mean(), atol=1e-7)


# The 100 published groups of Selective Rollout, where a checkout has them


@pytest.fixture(scope="module")
def published(shared_data: FilePath) -> list[dict[str, str]]:
    with (shared_data / "selective_rollout" / "hybrid_gate_features.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def column(rows: list[dict[str, str]], name: str, turn: int) -> np.ndarray:
    return np.array([float(row[name]) for row in rows if int(row["K"]) == turn])


def auroc(values: np.ndarray, mixed: np.ndarray) -> float:
    """The chance that a mixed group has the larger value than one without variance, ties halved."""
    pairs = [(a > b) + (a == b) / 2 for a in values[mixed] for b in values[~mixed]]
    return float(np.mean(pairs))


TABLE_7 = {  # turns 10, 15, 20
    "prefix_edit_distance_mean": (0.374, 0.419, 0.418),
    "action_bigram_jaccard_mean": (0.407, 0.406, 0.389),
    "unique_prefix_ratio": (0.398, 0.307, 0.208),
    "unique_action_ratio": (0.379, 0.272, 0.167),
    "action_entropy": (0.369, 0.255, 0.161),
    "obs_unique_ratio": (0.397, 0.307, 0.093),
    "termination_fraction": (-0.059, 0.110, 0.165),  # the paper prints .235 for the last one
}
TABLE_8 = {"pick_and_place_simple": 0.62, "pick_two_obj_and_place": 0.91, "pick_cool_then_place_in_recep": 0.48}


def test_selective_rollout_published_table_7_and_8_the_associations_of_the_signals_come_out_but_for_one_cell(published):
    variance = column(published, "reward_var", 10)
    for name, row in TABLE_7.items():
        found = [float(spearmanr(column(published, name, turn), variance).statistic) for turn in (10, 15, 20)]
        assert found == pytest.approx(row, abs=0.0006), name
    d, mixed = column(published, "prefix_edit_distance_mean", 10), variance > 0
    assert auroc(column(published, "prefix_edit_distance_mean", 15), mixed) == pytest.approx(0.77, abs=0.005)
    kinds = np.array([row["task_type"] for row in published if row["K"] == "10"])
    for kind, wanted in TABLE_8.items():
        assert auroc(d[kinds == kind], mixed[kinds == kind]) == pytest.approx(wanted, abs=0.005)
    assert set(kinds[(d < 0.12) & mixed]) == {"pick_and_place_simple"}  # E.4, all four


def test_selective_rollout_published_table_10_the_medians_of_the_labels(published) -> None:
    labels = np.array([row["label"] for row in published if row["K"] == "15"])
    d, tau = (column(published, name, 15) for name in ("prefix_edit_distance_mean", "termination_fraction"))
    found = {name: (np.sum(labels == name), np.median(d[labels == name]), np.median(tau[labels == name])) for name in
             ("all_succeed", "mixed", "all_fail")}  # fmt: skip
    assert [row[0] for row in found.values()] == [14, 61, 25]
    assert [float(row[1]) for row in found.values()] == pytest.approx([0.19, 0.47, 0.26], abs=0.006)
    assert [float(row[2]) for row in found.values()] == pytest.approx([1.0, 0.13, 0.0], abs=0.006)


def test_selective_rollout_published_table_12_what_random_cuts_and_an_oracle_would_do(published) -> None:
    """In expectation 23 cuts of 100 groups, 39 of them without variance, are right 9 times; the norm that is kept is
    that of 61 - 14 mixed groups."""
    flat = column(published, "reward_var", 10) == 0
    right = 23 * flat.sum() / len(flat)
    assert (flat.sum(), len(flat), round(right)) == (39, 100, 9)
    assert round(right / 23, 2) == 0.39
    assert math.sqrt((61 - (23 - right)) / 61) == pytest.approx(0.876, abs=0.005)
    assert pytest.approx(0.26) == 39 * 20 / (100 * 30)  # were all rollouts T long; 23.1% by their real lengths


# ARPO


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12), st.sampled_from([0.5, 0.7, 1.0, 2.0]))
def test_arpo_the_entropy_is_that_of_the_softmax_at_the_sampling_temperature(logits: list[float], tau: float) -> None:
    weights = np.exp(np.array(logits) / tau - max(logits) / tau)
    p = weights / weights.sum()
    found = draw(torch.tensor([logits]), torch.tensor([tau]), torch.tensor([0.5]), [tau])
    assert float(found.entropies[0]) == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-4)


@given(
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
    st.floats(0.1, 2.0),
    st.floats(-0.5, 1.5),
)
def test_arpo_branches_where_alpha_plus_beta_times_the_change_is_above_tau(before, after, beta, tau) -> None:
    """P = alpha + beta dH > tau with H over the first k tokens, H_initial over the first k of the trajectory."""
    chance = 0.5 + beta * (np.mean(after) - np.mean(before)) / math.log(50)
    if abs(chance - tau) < 1e-6:
        return
    rule = EntropyBrancher(vocabulary=50, probe_tokens=3, alpha=0.5, beta=beta, tau=tau)
    entropies = (tuple(before), (0.1,) * 4, tuple(after))
    moment = ForkMoment(task_id="t", key=(0,), turn=3, max_turns=9, budget=4, entropies=entropies, seed=0)
    decision = rule.decide(moment)
    assert decision is not None and (decision.branches > 1) == (chance > tau)


@settings(max_examples=25)
@given(tables, st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
def test_arpo_soft_estimation_gives_shared_tokens_the_mean_advantage_of_their_trajectories(theta, rewards) -> None:
    """Three trajectories, two of which share their first turn: on policy, flat GRPO over the three rows has at a shared
    token the gradient d times A_shared = (1/d) sum A_i, whether soft or hard."""
    theta = theta.requires_grad_()
    tree = RolloutTree("t")
    root = tree.add(None, NodeKind.PROMPT, (0,)).id

    def add(parent: int, place: int, tokens: tuple[int, ...]) -> int:
        said = tuple(float(logprob(theta.detach(), place + i, [token])) for i, token in enumerate(tokens))
        return tree.add(parent, NodeKind.COMPLETION, tokens, logprobs=said).id

    seen = tree.add(add(root, 0, (1, 2)), NodeKind.OBSERVATION, (6,)).id
    leaves = [add(seen, 3, (3,)), add(seen, 3, (4, 5)), add(root, 0, (3, 3))]
    for leaf in leaves:
        tree.stop(leaf, StopReason.COMPLETED)
    mean, deviation = np.mean(rewards), np.std(rewards)
    a = [(r - mean) / (deviation + 1e-6) for r in rewards]
    shared = 2 * (a[0] + a[1]) / 2 * logprob(theta, 0, (1, 2))
    tails = a[0] * logprob(theta, 3, (3,)) + a[1] * logprob(theta, 3, (4, 5)) + a[2] * logprob(theta, 0, (3, 3))
    wanted = torch.autograd.grad(-(shared + tails) / (2 + 1 + 2 + 2 + 2), theta)[0]  # the mean over trained tokens
    scored = Rewards({leaf: Verdict(reward, "") for leaf, reward in zip(leaves, rewards, strict=True)})
    config = LossConfig(kl_coefficient=0.0)
    for attribution in ("soft", "hard"):
        credit = CreditConfig(attribution=attribution).rule("tokens", per_rollout=False)(tree, scored)
        (batch,) = pack([tree], [credit], max_tokens=64)
        found = one_loss(batch, theta, config, loss_normalizer([batch], config))
        assert torch.allclose(torch.autograd.grad(found, theta)[0], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "tools", "reward"),
    [
        ("<answer>Paris</answer>", ("search", "python"), 1.1),  # correct, formed, several tools: + r_M
        ("<answer>Paris</answer>", ("search", "search"), 1.0),
        ("<answer>Rome</answer>", ("search", "python"), 0.0),
        ("Paris", ("search", "python"), -1.0),  # no format
    ],
)
def test_arpo_the_reward_is_format_then_correctness_then_several_tools(text, tools, reward) -> None:
    judged = HierarchicalReward().judge(
        Message("assistant", text), answers=("Paris",), answer_type="span", calls=[ExecutedCall(t) for t in tools]
    )
    assert judged.reward == pytest.approx(reward)


def test_arpo_a_fork_shares_what_came_before_it_and_saves_at_most_one_minus_n_over_m() -> None:
    """N = 1 chain of three calls and a branch after its last call: 3 calls are made where 6 would have been, one
    half = 1 - 1/2."""
    tree = RolloutTree("t")
    node = tree.add(None, NodeKind.PROMPT, (0,)).id
    call = Message("assistant", "", (ToolCall("search", {}),))
    for _ in range(3):
        node = tree.add(node, NodeKind.COMPLETION, (1,), logprobs=(0.0,), messages=(call,)).id
        node = tree.add(node, NodeKind.OBSERVATION, (6,), messages=(Message("tool", "x"),)).id
    for token in (2, 3):
        leaf = tree.add(node, NodeKind.COMPLETION, (token,), logprobs=(0.0,), messages=(Message("assistant", "x"),)).id
        tree.stop(leaf, StopReason.COMPLETED)
    found = account(tree)
    assert (found.calls_fresh, found.calls_chain) == (3, 6) and found.structural_saving == 0.5


def test_arpo_the_policy_gradient_theorem_holds_for_turns_as_macro_actions() -> None:
    """grad J = E sum_T grad log pi(MA_T | MS_T) A_T. Two turns of one token with an observation between them, a
    vocabulary of two: all pairs of trajectories are enumerated, the advantage of each is its reward minus the other's,
    and the library's gradient is that of the expected reward."""
    theta = table(5)
    theta[:, 2:] = -60.0  # two tokens have all the mass
    theta = theta.requires_grad_()
    paths = list(itertools.product(range(2), repeat=2))
    reward = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 0.0}

    def chance(path: tuple[int, ...]) -> Tensor:
        return (logprob(theta, 0, path[:1]) + logprob(theta, 2, path[1:])).exp()

    exact = torch.autograd.grad(sum(chance(path) * reward[path] for path in paths), theta)[0]
    found = torch.zeros_like(exact)
    rule = CreditConfig(advantages="rloo").rule("rollouts", per_rollout=False)
    for one, other in itertools.product(paths, repeat=2):
        tree, scored = grown([((a,), (b,)) for a, b in (one, other)], theta.detach(), [reward[one], reward[other]])
        (batch,) = pack([tree], [rule(tree, scored)], max_tokens=64)
        loss = one_loss(batch, theta, PAPER_LOSS, 2.0)
        found -= float((chance(one) * chance(other)).detach()) * torch.autograd.grad(loss, theta)[0]
    assert torch.allclose(found, exact, atol=1e-6)
