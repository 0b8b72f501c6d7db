"""What each remedy would have saved and cost: causal, exact, and never counted twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs_of_groups import FAIL, MIXED, SUCCEED, group

from turntree.audit.audit import AuditConfig, audit
from turntree.audit.comparison import PIVOT_THRESHOLD, cuts
from turntree.audit.played import play
from turntree.audit.remedies import SEEDS, Remedies, estimate, refill, replay
from turntree.decide.filters.greso import Greso, GresoConfig
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.logs.groups import LoggedGroup, LoggedRollout

LONG = tuple("abcdefgh")
kinds = st.sampled_from([FAIL, SUCCEED, MIXED, (0.0, 0.4), (None, 1.0)])
plays = st.lists(
    st.tuples(st.sampled_from("abc"), kinds, st.sampled_from([LONG, [LONG, LONG[::-1]]])), min_size=1, max_size=40
)
GATE = PrefixDivergenceGate(turn=3, threshold=0.2)


def built(log, per_iteration=4):
    return play([group(task, rewards, i // per_iteration, actions) for i, (task, rewards, actions) in enumerate(log)])


def everything(played, **changes):
    rules = {"greso": GresoConfig(), "gate": cuts(played, GATE), "dapo": True, "pivots": PIVOT_THRESHOLD}
    return Remedies(**{**rules, **changes})


@given(plays)
def test_a_group_is_removed_at_most_once_so_nothing_is_saved_twice(log):
    played = built(log)
    rules = everything(played)
    removed = replay(played, rules)
    stacked = np.stack([removed.skipped_N, removed.cut_N, removed.dropped_N])
    assert (stacked.sum(axis=0) <= 1).all()
    found = estimate(played, rules)
    for unit, spent in played.spent.items():
        saved = found["rollout_saved"][unit]
        assert saved is None or 0 <= saved <= spent.sum()
        assert 0 <= found["training_saved"][unit] <= played.trained[unit].sum()


@given(plays, st.integers(0, 40), st.integers(0, 3))
def test_what_a_remedy_does_to_a_group_does_not_depend_on_later_ones(log, cut, seed):
    played, earlier = built(log), built(log[: max(1, cut)])
    found, before = (replay(one, everything(one), seed) for one in (played, earlier))
    for mask in ("skipped_N", "cut_N", "dropped_N"):
        assert (getattr(found, mask)[: len(earlier.groups)] == getattr(before, mask)).all()


@given(plays)
def test_the_dapo_filter_saves_exactly_the_training_on_zero_variance_groups(log):
    played = built(log)
    found = estimate(played, Remedies(dapo=True))
    assert found["dropped"] == played.zero_variance_N.sum() and found["mixed_lost"] == 0
    assert set(found["rollout_saved"].values()) == {0}
    assert found["training_saved"]["tokens"] == played.trained["tokens"][played.zero_variance_N].sum()


@given(plays, st.integers(0, 5))
def test_greso_skips_what_the_online_class_would_have_skipped(log, seed):
    """Replayed by hand: per iteration first all decisions, then the outcomes of what was played, then an adjustment."""
    played, greso, skipped = built(log), Greso(GresoConfig(seed=seed)), []
    for start in range(0, len(log), 4):
        batch = [
            (task, rewards, greso.skip(task, start // 4) is not None) for task, rewards, _ in log[start : start + 4]
        ]
        for task, rewards, skip in batch:
            if not skip:
                greso.record(task, rewards)
        greso.end_iteration()
        skipped += [skip for *_, skip in batch]
    assert replay(played, Remedies(greso=GresoConfig()), seed).skipped_N.tolist() == skipped


def test_a_cut_group_is_censored_in_the_history_so_a_gate_starves_greso():
    log = [("a", FAIL, LONG)] * 30
    played = built(log, per_iteration=1)
    alone = replay(played, Remedies(greso=GresoConfig()))
    both = replay(played, Remedies(greso=GresoConfig(), gate=cuts(played, GATE)))
    assert alone.skipped_N.sum() > 20 and both.skipped_N.sum() == 0 and both.cut_N.all()


def test_pivot_selection_plays_again_only_what_was_mixed_and_hard_when_first_seen():
    first = {"hard": (0.0, 0.0, 1.0), "easy": (1.0, 1.0, 0.0), "never": (0.0, 0.0, 0.0), "unseen": (None, None, 1.0)}
    log = [group(task, rewards, 0) for task, rewards in first.items()]
    log += [group(task, (0.0, 1.0, 1.0), 1) for task in first]
    removed = replay(play(log), Remedies(pivots=PIVOT_THRESHOLD))
    skipped = {one.id for one, gone in zip(log, removed.skipped_N, strict=True) if gone}
    assert skipped == {"1/easy", "1/never"}  # a censored first group is no profile: the next one is
    kept = replay(play([*log, group("unseen", MIXED, 2)]), Remedies(pivots=PIVOT_THRESHOLD))
    assert kept.skipped_N.tolist()[-1]  # whose mean was above 0.6
    later = replay(play([*log, group("hard", MIXED, 2)]), Remedies(pivots=PIVOT_THRESHOLD))
    assert not later.skipped_N.tolist()[-1]  # its second group was easy, and is no new profile


def test_a_skipped_group_without_two_rewards_saves_generation_only():
    played = play([group("a", FAIL, 0), group("a", (None, 1.0), 1)])
    found = estimate(played, Remedies(pivots=PIVOT_THRESHOLD))
    assert found["skipped"] == 1 and found["rollout_saved"]["turns"] == 4
    assert found["training_saved"]["turns"] == 0 and found["zero_variance_avoided"] == 0


class TestGate:
    def test_it_saves_what_came_after_its_turn_censored_rollouts_included(self):
        rollouts = tuple(
            LoggedRollout(actions=LONG[:n], reward=reward, turn_tokens=tuple(range(1, n + 1)))
            for n, reward in ((8, 0.0), (8, 0.0), (5, None))
        )
        played = play([LoggedGroup(id="g", task="t", rollouts=rollouts, iteration=0)])
        found = estimate(played, Remedies(gate=cuts(played, GATE)))
        assert found["cut"] == 1 and found["precision"] == 1.0
        assert found["rollout_saved"]["turns"] == 5 + 5 + 2
        assert found["rollout_saved"]["tokens"] == 2 * sum(range(4, 9)) + 4 + 5
        assert found["training_saved"]["tokens"] == 2 * sum(
            range(1, 9)
        )  # the censored one would not have been trained on

    def test_it_sees_the_first_turns_only_and_leaves_alone_what_has_ended_by_then(self):
        alike, apart = [LONG, LONG[:3] + ("z",) * 5], [LONG, ("z", *LONG[1:])]
        log = [group("cut", FAIL, 0, alike), group("apart", FAIL, 0, apart), group("ended", FAIL, 0, LONG[:3])]
        assert cuts(play(log), GATE).cut_N.tolist() == [True, False, False]

    def test_forked_rollouts_are_not_compared(self):
        rollouts = tuple(
            LoggedRollout(actions=LONG, reward=0.0, turn_tokens=(1,) * 8, forked=forked) for forked in (False, True)
        )
        assert not cuts(play([LoggedGroup(id="g", task="t", rollouts=rollouts)]), GATE).cut_N.any()

    def test_tokens_are_unknown_where_only_their_sum_is_logged(self):
        rollouts = (LoggedRollout(actions=LONG, reward=0.0, tokens=80),) * 2
        found = estimate(
            played := play([LoggedGroup(id="g", task="t", rollouts=rollouts)]), Remedies(gate=cuts(played, GATE))
        )
        assert found["rollout_saved"] == {"tokens": None, "turns": 10, "characters": None}
        assert found["rollout_saved_share"]["tokens"] is None and found["rollout_saved_share"]["turns"] == 10 / 16


def test_a_gate_is_recommended_where_the_log_supports_one_and_refused_with_the_reason_where_not():
    alike = [group(f"f{i}", FAIL * 2, 0, LONG) for i in range(40)]
    apart = [group(f"m{i}", MIXED * 2, 0, [LONG[k:] + LONG[:k] for k in range(4)]) for i in range(40)]
    found = audit([*alike, *apart], AuditConfig())
    assert found["gate"]["recommended"]["actionable"]["tp"] == 40 and found["remedies"]["gate"]["cut"] == 40
    assert found["remedies"]["gate"]["mixed_lost"] == 0
    refused = audit([*alike[:5], *apart[:5]], AuditConfig())
    assert refused["gate"]["recommended"] is None and refused["remedies"]["gate"] is None
    assert "support no operating point" in refused["absent"]["gate"] == refused["gate"]["refused"]


def test_rollouts_that_no_gate_could_compare_leave_the_rest_of_the_audit_as_it_is():
    """A brancher that forks one start: all rollouts of a group share their first turns."""
    forked = [
        replace(one, rollouts=(one.rollouts[0], *(replace(rollout, forked=True) for rollout in one.rollouts[1:])))
        for one in (group(f"f{i}", FAIL * 2, 0, LONG) for i in range(4))
    ]
    found = audit(forked, AuditConfig())
    assert found["zero_variance_rate"] == 1.0 and found["remedies"]["dapo"]["dropped"] == 4
    assert found["remedies"]["gate"] is None and found["remedies"]["gate_paper"]["cut"] == 0
    assert "12 rollouts that share their first turns with another" in found["absent"]["gate"]


@given(plays, st.permutations(range(40)))
def test_an_audit_does_not_depend_on_which_file_holds_an_iteration(log, shuffle):
    """Several workers write one file each: a remedy must not know an iteration that is played later."""
    groups = [group(task, rewards, i, actions) for i, (task, rewards, actions) in enumerate(log)]
    shuffled = [groups[i] for i in shuffle if i < len(groups)]
    rules = Remedies(greso=GresoConfig(), pivots=PIVOT_THRESHOLD, dapo=True)

    def removed(played):
        found = replay(played, rules, 3)
        masks = zip(found.skipped_N.tolist(), found.cut_N.tolist(), found.dropped_N.tolist(), strict=True)
        return {(each.iteration, each.id): mask for each, mask in zip(played.groups, masks, strict=True)}

    assert removed(play(groups)) == removed(play(shuffled))


def test_a_gate_that_is_precise_because_hardly_a_group_teaches_is_not_recommended():
    """With 90% of the groups flat, cutting every group has a precision of 90%."""
    flat = [group(f"f{i}", FAIL * 2, 0, [LONG[k:] + LONG[:k] for k in range(4)]) for i in range(180)]
    mixed = [group(f"m{i}", MIXED * 2, 0, [LONG[k:] + LONG[:k] for k in range(4)]) for i in range(20)]
    found = audit([*flat, *mixed], AuditConfig())
    assert found["gate"]["recommended"] is None
    assert "would also cut 100% of the groups with a gradient, more than 10%" in found["gate"]["refused"]


def test_together_saves_no_more_than_the_parts_and_no_less_than_each():
    log = [group("a", FAIL, i, LONG) for i in range(10)] + [group("b", MIXED, i, [LONG, LONG[::-1]]) for i in range(10)]
    found = audit(sorted(log, key=lambda one: one.iteration), AuditConfig())["remedies"]
    parts = [found[name]["training_saved"]["tokens"] for name in ("dapo", "greso")]
    assert max(parts) <= found["together"]["training_saved"]["tokens"] < sum(parts)
    assert found["greso"]["seeds"] == SEEDS


def test_a_refill_replaces_every_flat_group_by_draws_until_one_is_mixed():
    log = [group("a", FAIL, tokens=30), group("b", FAIL, tokens=10), group("c", MIXED, tokens=20)]
    assert refill(play(log)) == {
        "groups": pytest.approx(2 / (1 / 3)),
        "spent": pytest.approx({"tokens": 6 * 80.0, "turns": 24.0, "characters": 24.0}),
    }
    assert refill(play([group("a", FAIL)])) is None
