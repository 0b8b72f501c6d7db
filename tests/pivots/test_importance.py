"""Importance: what an episode loses by a refused action, and how little of a noisy difference is believed."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.pivots.importance import choose, shrunk, weigh
from turntree.rollout.continuations import PlayOn, Rest
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.rebuild import Rebuilder
from turntree.stages.config import Device
from turntree.stages.policy import load_policy
from turntree_worlds.household.entry import GamesConfig, games
from turntree_worlds.household.experts import shortest_plan

measured = st.fixed_dictionaries({"difference": st.floats(-1, 1), "error": st.floats(0, 0.7)})


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | measured), min_size=1, max_size=30))
def test_a_shrunk_value_lies_between_the_measured_one_and_the_others_of_its_kind(pairs) -> None:
    kinds, found = [kind for kind, _ in pairs], [one for _, one in pairs]
    if not any(found):
        with pytest.raises(ValueError):
            shrunk(kinds, found)
        return
    values = shrunk(kinds, found)
    for kind, one, value in zip(kinds, found, values, strict=True):
        alike = [o["difference"] for k, o in pairs if k == kind and o] or [o["difference"] for o in found if o]
        assert min(alike) - 1e-9 <= value <= max(alike) + 1e-9
        if one is None:
            assert value == pytest.approx(values[[k == kind and o is None for k, o in pairs].index(True)])


def test_shrinking_is_nearer_to_the_truth_than_what_was_measured_and_than_the_mean_of_the_kind() -> None:
    rng = seeds.generator(0, "simulated")
    truth = {"take": 0.4, "walk": 0.1}
    kinds = [kind for kind in truth for _ in range(150)]
    true = [rng.gauss(truth[kind], 0.15) for kind in kinds]
    errors = [rng.uniform(0.1, 0.4) for _ in kinds]
    seen = [{"difference": rng.gauss(value, error), "error": error} for value, error in zip(true, errors, strict=True)]

    def off(values: list[float]) -> float:
        return statistics.fmean((value - real) ** 2 for value, real in zip(values, true, strict=True))

    means = {
        k: statistics.fmean(o["difference"] for kind, o in zip(kinds, seen, strict=True) if kind == k) for k in truth
    }
    best = off(shrunk(kinds, seen))
    assert best < off([one["difference"] for one in seen]) and best < off([means[kind] for kind in kinds])


def test_an_accepted_and_a_refused_action_are_chosen_and_only_where_both_were_sampled() -> None:
    state = TurnState("t", 0, (Message("user", "x"),), Message("assistant", "good"))
    mean = 2 / 7
    actions = [
        {"text": "good", "reward": 1.0, "strict": 1.0, "count": 2},
        {"text": "bad", "reward": 0.0, "strict": 0.0, "count": 5},
        {"text": "odd", "reward": None, "strict": None, "count": 1},
    ]
    for seed in range(20):
        sides = choose(state, {"actions": actions, "reward_mean": mean}, seed)
        assert [(side.name, side.action.content) for side in sides] == [("accepted", "good"), ("refused", "bad")]
    assert choose(state, {"actions": actions[1:], "reward_mean": 0.0}, 0) == []


def test_graded_rewards_are_split_at_their_mean() -> None:
    state = TurnState("t", 0, (Message("user", "x"),), Message("assistant", "good"))
    actions = [
        {"text": "better", "reward": 0.7, "strict": 0.0, "count": 1},
        {"text": "worse", "reward": 0.3, "strict": 0.0, "count": 3},
    ]
    sides = choose(state, {"actions": actions, "reward_mean": 0.4}, 0)
    assert [side.action.content for side in sides] == ["better", "worse"]


def test_exact_outcomes_are_believed() -> None:
    """Actions that end the episode: half of the states hang on them wholly, half not at all."""
    found = [{"difference": float(place % 2), "error": 0.0} for place in range(40)]
    assert shrunk(["answer"] * 40, found) == pytest.approx([one["difference"] for one in found], abs=0.01)


def test_extreme_outcomes_do_not_pull_the_mean_of_their_kind() -> None:
    """Inverse-variance weights would: 4 of 4 against 0 of 4 looks more certain than 2 of 4 against 2 of 4."""
    rng = seeds.generator(0, "states")
    found = []
    for place in range(2000):
        chances = (1.0, 0.0) if place % 2 else (0.5, 0.5)
        outcomes = [[float(rng.random() < chance) for _ in range(4)] for chance in chances]
        padded = [(sum(each) + 0.5) / 5 for each in outcomes]
        error = sum(p * (1 - p) / 4 for p in padded) ** 0.5
        found.append({"difference": (sum(outcomes[0]) - sum(outcomes[1])) / 4, "error": error})
    assert shrunk([*["k"] * 2000, "k"], [*found, None])[-1] == pytest.approx(0.5, abs=0.03)


def test_the_action_that_wins_is_worth_a_success_where_no_turn_is_left_to_repair() -> None:
    """The last turn of a game: what is measured is exact, because nothing is sampled after it."""
    (game, source), *_ = games(GamesConfig(split="train", count=1))
    world, messages = game.reset(), [Message("user", game.intro)]
    *before, last = shortest_plan(world)
    for command in before:
        messages += [Message("assistant", command), Message("user", world.step(command).observation)]
    state = TurnState("t", len(before), tuple(messages), Message("assistant", last), environment=source)
    policy = load_policy("household", Device())
    episodes = EpisodeConfig(max_turns=len(before) + 1, sampling=Sampling(max_tokens=8))
    play_on = PlayOn(Rebuilder(Part("household")), policy.engine, policy.renderer, episodes, forks=2)
    actions = [{"text": last, "reward": 1.0, "count": 1}, {"text": "look", "reward": 0.0, "count": 1}]
    (found,), _ = weigh([state], [{"actions": actions, "reward_mean": 0.5}], play_on, seed=0)
    assert found is not None and found.error == 0
    assert (found.accepted, found.refused, found.difference) == (1.0, 0.0, 1.0)


def test_the_rest_of_an_episode_ends_as_a_failure_when_its_turns_are_used() -> None:
    (game, source), *_ = games(GamesConfig(split="train", count=1))
    state = TurnState("t", 0, (Message("user", game.intro),), Message("assistant", "look"), environment=source)
    environment, _ = Rebuilder(Part("household")).at(state)
    rest = Rest("t", environment, state.history, turns=2)
    twin = rest.fork()
    assert not rest.step(Message("assistant", "look")).done
    answer = rest.step(Message("assistant", "look"))
    assert answer.done and answer.success is False
    assert not twin.step(Message("assistant", "look")).done  # a fork counts its own turns
