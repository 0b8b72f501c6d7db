"""A chat template or a parser that fails in the middle of a run costs the rollout that it failed on, never the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fault_drill import Corridor, Even
from scripted_engine import ScriptedEngine
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.engine.hf import HFEngine
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import Limits, Prompted, sample_local, score_wave, that_fit
from turntree.rollout.players import grow
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.rollout.service import Parts
from turntree.stages.train_pivot import _fitting
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.config import LossConfig
from turntree.train.loop import Trainee, train
from turntree.train.online import OnlineConfig, OnlineGRPO
from turntree.verify.strict import StrictMatch

TOKENIZER = tiny_tokenizer()
LIMITS = Limits(16, context=4096, path=4096)
NO_ROLE = InputError("no such role", field="messages")
TASKS = [Corridor("t", 2), Corridor("u", 2)]
EPISODES = EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=16))


class Failing(ChatRenderer):
    """Raises at the calls of one verb whose number `when` holds for."""

    def __init__(self, verb: str, when: Callable[[int], bool], error: Exception | None = None) -> None:
        super().__init__(TOKENIZER)
        self.verb, self.when, self.calls = verb, when, 0
        self.error = error or KeyError("the template's own")

    def _meet(self, verb: str) -> None:
        if verb == self.verb:
            self.calls += 1
            if self.when(self.calls):
                raise self.error

    def prompt(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        self._meet("prompt")
        return super().prompt(messages, tools)

    def extend(self, messages: Any, new: Any, tools: Any = (), *, stopped: bool = True) -> tuple[int, ...]:
        self._meet("extend")
        return super().extend(messages, new, tools, stopped=stopped)

    def parse(self, token_ids: Sequence[int], tools: Any = ()) -> Message:
        self._meet("parse")
        return super().parse(token_ids, tools)


def engine() -> ScriptedEngine:
    words = [ChatRenderer(TOKENIZER).completion(Message("assistant", word)) for word in ("left", "right", "on")]
    stops = ChatRenderer(TOKENIZER).stop_ids
    return ScriptedEngine(lambda prompt, seed: words[seed % 3], stops, vocab_size=len(TOKENIZER))


def stops(tree: RolloutTree) -> Counter[str]:
    return Counter(str(tree.stop_reason(leaf)) for leaf in tree.leaves())


def lost(tree: RolloutTree) -> int:
    return stops(tree)["renderer_error"]


def grown(renderer: Failing) -> list[tuple[RolloutTree, Rewards]]:
    return grow(TASKS, engine(), renderer, EPISODES, group_size=4, seed=0)


@pytest.mark.parametrize("verb", ["parse", "extend"])
def test_the_rollout_is_censored_with_its_reason_and_its_siblings_are_not(verb: str) -> None:
    (tree, rewards), *_ = sorted(grown(Failing(verb, lambda call: call == 2)), key=lambda one: -lost(one[0]))
    calm = next(calm for calm, _ in grown(Failing(verb, lambda call: False)) if calm.task_id == tree.task_id)
    assert stops(tree)["renderer_error"] == 1 and len(tree.leaves()) == 4
    (leaf,) = [leaf for leaf in tree.leaves() if tree.stop_reason(leaf) is StopReason.RENDERER_ERROR]
    assert rewards.of(leaf) is None
    assert rewards.verdicts[leaf].reason == 'KeyError: "the template\'s own"'
    assert len(rewards.scored()) == 3
    sampled = [node.token_ids for node in tree if node.kind is NodeKind.COMPLETION and node.turn == 1]
    assert sampled == [n.token_ids for n in calm if n.kind is NodeKind.COMPLETION and n.turn == 1], "paid for, and kept"


def test_a_task_that_cannot_be_rendered_is_a_censored_group() -> None:
    (_, _), (tree, rewards) = grown(Failing("prompt", lambda call: call > 1, NO_ROLE))
    assert set(stops(tree)) == {"renderer_error"}
    assert not rewards.scored()
    assert {verdict.reason for verdict in rewards.verdicts.values()} == {"field 'messages': no such role"}


def test_a_refill_whose_first_turn_cannot_be_read_is_marked_as_one() -> None:
    renderer = Failing("parse", lambda call: call > 1)
    config = SchedulerConfig(episodes=replace(EPISODES, max_turns=1), group_size=3, initial_rollouts=1)
    (group,) = Scheduler(engine(), renderer, config).run(TASKS[:1], seed=0)
    assert stops(group.tree)["renderer_error"] == 2
    assert group.tree.refills() == set(group.tree.starts()[1:])


def test_a_run_whose_first_task_cannot_be_rendered_ends_in_one_line() -> None:
    with pytest.raises(InputError, match=r"no such role; see turntree check model"):
        grown(Failing("prompt", lambda call: True, NO_ROLE))


def test_a_local_rollout_that_cannot_be_read_has_no_reward() -> None:
    state = TurnState("t", 0, (Message("user", "go"),), Message("assistant", "left"))
    renderer = Failing("parse", lambda call: call == 1)
    prompted = Prompted(state, renderer.prompt(state.history))
    (tree,) = sample_local([prompted], engine(), renderer, Sampling(max_tokens=8), 3, 0)
    (rewards,) = score_wave([(tree, state)], StrictMatch())
    assert stops(tree) == {"renderer_error": 1, "completed": 2}
    assert [rewards.of(leaf) is None for leaf in tree.leaves()] == [True, False, False]


def test_a_candidate_that_cannot_be_rendered_is_counted_and_the_profile_goes_on() -> None:
    states = [TurnState(f"t{i}", 0, (Message("user", "go"),), Message("assistant", "left")) for i in range(3)]
    fitting, skipped = that_fit(states, Failing("prompt", lambda call: call == 2), LIMITS)
    assert [(place, item.state.id) for place, item in fitting] == [(0, "t0#0"), (2, "t2#0")]
    assert skipped == {'renderer_error: KeyError: "the template\'s own"': 1}


def trained_with(renderer: Failing) -> list[dict[str, Any]]:
    model, rows = tiny_model(seed=1), []
    tasks = [Even(f"task {number}", 2) for number in range(4)]
    run = Parts(Trainee(model, HFEngine(model, renderer.stop_ids), renderer), tasks)
    episodes = {**vars(EPISODES), "cut_turns": "judge"}  # so that all are answered
    config = OnlineConfig(iterations=2, groups=2, group_size=4, **episodes)
    train(OnlineGRPO(run, config), log=rows.append)
    return rows


@pytest.mark.parametrize("verb", ["parse", "extend", "prompt"])
def test_online_training_goes_on_and_counts_what_was_lost(verb: str) -> None:
    rows = trained_with(Failing(verb, lambda call: call % 3 == 2))
    counted = sum((Counter(row["stops"]) for row in rows if row["step"]), Counter())
    assert counted.total() == 2 * 2 * 4
    assert 0 < counted["renderer_error"] < counted.total()


def test_an_iteration_in_which_everything_is_censored_learns_nothing_and_the_run_ends() -> None:
    rows = trained_with(Failing("parse", lambda call: True))
    trained = [row for row in rows if row["step"]]
    assert [row["stops"] for row in trained] == [{"renderer_error": 8}] * 2
    assert [row["groups_censored"] for row in trained] == [2, 2]
    assert all("loss" not in row or row["loss"] is None for row in trained)


def test_a_held_out_state_that_cannot_be_rendered_is_left_out_of_the_checks_and_said(capfd: Any) -> None:
    states = [TurnState(f"t{i}", 0, (Message("user", "go"),), Message("assistant", "left")) for i in range(3)]
    told = "held-out states cannot be sampled"
    found, _ = _fitting(states, Failing("prompt", lambda call: call == 2), LIMITS, told)
    assert [item.state.id for _, item in found] == ["t0#0", "t2#0"]
    assert "1 of 3 held-out states cannot be sampled" in capfd.readouterr().err
    with pytest.raises(InputError, match=r"3 of 3 held-out states .* no such role"):
        _fitting(states, Failing("prompt", lambda call: True, NO_ROLE), LIMITS, told)


class OneTask(ChatRenderer):
    """Has no form for the task of this length."""

    def __init__(self, length: int) -> None:
        super().__init__(TOKENIZER)
        self.length = length

    def prompt(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        if messages[0].content == f"walk {self.length}":
            raise NO_ROLE
        return super().prompt(messages, tools)


def test_a_run_goes_on_where_its_next_task_is_the_one_that_cannot_be_rendered(tmp_path: Path) -> None:
    def rows(folder: str, iterations: int, unwritten: int) -> list[Any]:
        found: list[Any] = []
        model, renderer = tiny_model(seed=1), OneTask(unwritten)
        tasks = [Even(str(number), number) for number in range(1, 4)]
        run = Parts(Trainee(model, HFEngine(model, renderer.stop_ids), renderer), tasks)
        config = OnlineConfig(
            iterations=iterations,
            groups=1,
            group_size=4,
            loss=LossConfig(kl_coefficient=0),
            **vars(EPISODES),
        )
        keep: Any = lambda step, groups, credits: found.extend(group.tree.task_id for group in groups)  # noqa: E731
        checkpoints = Checkpoints(tmp_path / folder, CheckpointConfig(every=1))
        train(OnlineGRPO(run, config), log=found.append, keep=keep, checkpoints=checkpoints)
        return [{**row, "timing": None} if isinstance(row, dict) else row for row in found]

    second = int(rows("order", 2, 99)[2])
    whole = rows("whole", 2, second)
    assert whole[-1]["stops"] == {"renderer_error": 4}
    rows("killed", 1, second)
    assert rows("killed", 2, second)[-2:] == whole[-2:]


@pytest.mark.parametrize(
    ("limits", "reason"),
    (
        (Limits(16, context=4096, path=40), "path_above_train_max_tokens"),
        (Limits(16, context=40, path=4096), "prompt_above_context"),
        (Limits(8, context=4096, path=4096), "demonstration_above_max_tokens"),
    ),
)
def test_a_state_that_could_not_be_trained_on_is_left_out_and_counted_by_its_reason(
    limits: Limits, reason: str
) -> None:
    words = [1, 40, 1]
    states = [
        TurnState(f"t{i}", 0, (Message("user", "go " * n),), Message("assistant", "go")) for i, n in enumerate(words)
    ]
    if reason.startswith("demonstration"):
        states = [replace(s, demonstration=Message("assistant", "go " * n)) for s, n in zip(states, words, strict=True)]
    fitting, skipped = that_fit(states, ChatRenderer(TOKENIZER), limits)
    assert [place for place, _ in fitting] == [0, 2]
    assert skipped == {reason: 1}
