"""A policy's own states, labelled: what was played stays, and the teacher leads to the goal from anywhere."""

import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Observation
from turntree.engine.tokenizer import load_tokenizer
from turntree.env.tasks import Replayed
from turntree.render.choice import renderer_of
from turntree.rollout.teachers import labelled
from turntree.stages.policy import resolve
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace
from turntree.train.sft import examples
from turntree_worlds.household.demonstrator import teacher
from turntree_worlds.household.environment import HouseholdEnvironment, generated
from turntree_worlds.household.experts import slip
from turntree_worlds.household.verifier import HouseholdVerifier

GAMES = [generated(1_000_000 + number, "easy") for number in range(6)]


def clumsy(seed: int, turns: int) -> tuple[HouseholdEnvironment, Trace]:
    """A game played with mistakes only."""
    game = GAMES[seed % len(GAMES)]
    source = {"name": "household", "task_id": game.id}
    environment = HouseholdEnvironment(game)
    rng = random.Random(seed)
    messages = list(environment.reset())
    for _ in range(turns):
        action = Message("assistant", slip(environment.world, rng))
        observation = environment.step(action)
        messages += [action, *observation.messages]
        if observation.done:
            break
    return HouseholdEnvironment(game), Trace(id="t", messages=tuple(messages), environment=source, domain="household")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 500), st.integers(1, 10))
def test_every_state_is_labelled_with_an_action_that_the_verifier_accepts(seed: int, turns: int) -> None:
    task, trace = clumsy(seed, turns)
    own, missing, _ = labelled(trace, task, teacher)
    assert len(own.labels) + sum(missing.values()) == len(trace.turn_positions)
    assert own.messages == trace.messages
    verifier = HouseholdVerifier()
    for state in candidates(own):
        assert verifier.judge(state, state.demonstration).reward == 1.0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 500), st.integers(0, 10))
def test_a_player_who_follows_the_teacher_from_any_own_state_wins(seed: int, turns: int) -> None:
    task, trace = clumsy(seed, max(1, turns))
    list(task.reset())
    for message in trace.messages:
        if message.role == "assistant" and task.step(message).done:
            return
    for _ in range(60):
        said = teacher(task, ())
        if isinstance(said, str):
            assert said == "goal out of reach"
            return
        if task.step(said).done:
            return
    pytest.fail("sixty turns of the teacher did not win")


def test_a_teacher_behind_a_server_is_asked_about_several_states_at_once_and_says_the_same() -> None:
    task, trace = clumsy(1, 6)
    together = threading.Barrier(3, timeout=60)

    class Waits:
        concurrency = 3

        def __call__(self, environment: HouseholdEnvironment, history: object) -> Message | str:
            together.wait()
            return teacher(environment, ())

    assert len(trace.turn_positions) == 6
    assert labelled(trace, task, Waits())[:2] == labelled(trace, task, teacher)[:2]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_what_is_no_label_is_counted_and_an_environment_without_copies_gives_none(
    concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, trace = clumsy(1, 4)

    def silent(environment: HouseholdEnvironment, history: object) -> None:
        return None

    silent.concurrency = concurrency
    own, missing, _ = labelled(trace, task, silent)  # pyright: ignore[reportArgumentType]
    assert own.labels == {} and missing == Counter({"no_label: None": 4}) and not candidates(own)

    def full(environment: HouseholdEnvironment) -> HouseholdEnvironment:
        raise RuntimeError("no room")

    walked = HouseholdEnvironment.fork
    forks = iter([walked, *[full] * 4])  # the first copy is the one that is played again
    monkeypatch.setattr(HouseholdEnvironment, "fork", lambda self: next(forks)(self))
    own, missing, _ = labelled(trace, task, silent)  # pyright: ignore[reportArgumentType]
    assert missing == Counter({"no_label: the teacher failed (RuntimeError: no room)": 4})


def test_a_teacher_is_shown_the_users_own_object_where_the_environment_has_no_fork() -> None:
    class Count:
        task_id = "count"

        def reset(self) -> tuple[Message, ...]:
            self.said = 0
            return (Message("user", "count"),)

        def step(self, action: Message) -> Observation:
            self.said += 1
            return Observation((Message("user", str(self.said)),), done=False)

    messages = [Message("user", "count")]
    for number in range(1, 4):
        messages += [Message("assistant", "next"), Message("user", str(number))]
    trace = Trace(id="t", messages=tuple(messages))
    own, missing, _ = labelled(trace, Replayed(Count()), lambda shown, _: Message("assistant", f"{shown.said + 1}"))
    assert [label.content for label in own.labels.values()] == ["1", "2", "3"] and not missing


def test_a_teacher_that_fails_is_counted_and_labels_nothing() -> None:
    task, trace = clumsy(1, 4)

    def broken(environment: object, history: object) -> Message:
        raise ValueError("out of order")

    own, missing, _ = labelled(trace, task, broken)
    assert own.labels == {} and missing == Counter({"no_label: the teacher failed (ValueError: out of order)": 4})
    assert candidates(own) == []  # what the policy did is not taught in place of the missing labels


@pytest.mark.parametrize(
    "said",
    [
        Message("assistant", "", (ToolCall("go", {"to": float("nan")}),)),
        Message("assistant", "", (ToolCall("go", {"to": object()}),)),
        Message("assistant", "half a character: \ud83d"),
    ],
)
def test_a_label_that_no_file_can_hold_is_no_label(said: Message) -> None:
    task, trace = clumsy(3, 4)
    own, missing, _ = labelled(trace, task, lambda environment, history: said)
    assert own.labels == {} and missing.total() == 4
    assert all(reason.startswith("no_label: the teacher failed (") for reason in missing)


def test_an_environment_that_answers_differently_leaves_the_rest_unlabelled() -> None:
    task, trace = clumsy(2, 4)
    messages = list(trace.messages)
    messages[2] = replace(messages[2], content="something else")
    own, missing, _ = labelled(replace(trace, messages=tuple(messages)), task, teacher)
    assert set(own.labels) == {0} and sum(missing.values()) == 3


def test_sft_on_a_labelled_trace_learns_the_labels_and_nothing_that_was_played() -> None:
    task, trace = clumsy(3, 5)
    own, _, _ = labelled(trace, task, teacher)
    folder = resolve("household")
    tokenizer = load_tokenizer(folder)
    renderer = renderer_of(tokenizer, folder)
    learned = examples(own, renderer)
    assert len(learned) == len(own.labels)
    for row, label in zip(learned, own.labels.values(), strict=True):
        said = [token for token, learns in zip(row.token_ids, row.loss_mask, strict=True) if learns]
        assert tuple(said) == renderer.completion(label)
