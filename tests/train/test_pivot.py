"""What a step of PivotRL draws, replaces, trains on and reports, with a tiny random policy."""

from types import SimpleNamespace

import pytest
import torch

from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.engine.hf import HFEngine
from turntree.render.template import ChatRenderer
from turntree.rollout.local import render
from turntree.train import loop
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.loop import Checked, Trainee
from turntree.train.optimizer import OptimizerConfig
from turntree.train.pivot import Pivot, PivotConfig, PivotRL

GROUP = 4


class ByTrace(TurnVerifier):
    """Rewards by the name of the trace; of "mixed" ones every second judgement is right."""

    name = "by-trace"

    def __init__(self):
        self.judged = []

    def judge(self, state, action):
        self.judged.append((state.trace_id, action.content))
        odd = float(len(action.content) % 2)
        rewards = {"dead": 0.0, "solved": 1.0, "broken": None, "chance": odd}
        rewards["single"] = 1.0 if len(self.judged) % GROUP == 1 else None
        reward = rewards.get(state.trace_id.split("-")[0], float(len(self.judged) % 2))
        return Verdict(reward, "as the test says", "say")


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(tiny_tokenizer())


@pytest.fixture
def train(renderer):
    """Train on pivots of the given names ("anchor:" in front of a name gives that role); rows and result."""

    def command(
        names, *, check=None, log=None, checkpoints=None, engines=None, words="", own=None, keep=None, **settings
    ):
        model = tiny_model()
        verifier = ByTrace()
        pivots = []
        for index, name in enumerate(names):
            role, _, trace = name.rpartition(":")
            state = TurnState(
                f"{trace}-{index}", 0, (Message("user", f"say {index}{words}"),), Message("assistant", "yes")
            )
            pivots.append(Pivot(render(state, renderer), "say", role or "pivot"))
        short = {"sampling": Sampling(max_tokens=6), "cut_turns": "judge"}  # a random policy does not stop in time
        config = PivotConfig(**{"steps": 1, "groups": 4, "group_size": GROUP, **short, **settings})
        rows = []
        engine = HFEngine(model, renderer.stop_ids)
        (engines if engines is not None else []).append(engine)  # for a check that uses it
        algorithm = PivotRL(Trainee(model, engine, renderer), config, pivots, verifier, own=own)
        kept = {"keep": keep} if keep else {}
        trained = loop.train(algorithm, log or rows.append, check, checkpoints=checkpoints, **kept)
        return SimpleNamespace(
            rows=rows, algorithm=algorithm, trained=trained, judged=verifier.judged, engine=engine, model=model
        )

    return command


def test_every_group_drawn_is_trained_on_by_default(train) -> None:
    (row,) = train(["dead", "dead", "mixed", "mixed"]).rows
    assert row["trees"] == 4
    assert row["mixed_groups"] == 0.5


def test_turns_that_the_token_limit_cut_are_failures_and_are_counted(train) -> None:
    done = train(["solved"] * 4, cut_turns="fail")
    (row,) = done.rows
    assert row["cut_turns"] == 4 * GROUP - len(done.judged) > 0 == row["censored"]
    assert row["reward_mean"] == 1 - row["cut_turns"] / (4 * GROUP)


def test_a_step_whose_rollouts_are_all_censored_is_skipped_and_counted(train) -> None:
    done = train(["broken"] * 4, steps=3)
    assert [(row["trained_groups"], row["reward_mean"], row["censored"]) for row in done.rows] == [
        (0, None, 4 * GROUP)
    ] * 3
    assert done.engine.policy_version == 0, "nothing was learned"
    assert all(
        torch.equal(old, new) for old, new in zip(tiny_model().parameters(), done.model.parameters(), strict=True)
    )
    assert done.trained.cost.turns == done.rows[-1]["turns"] == 3 * 4 * GROUP, "and it was paid for"
    assert done.trained.cost.trained_tokens == 0


def test_a_skipped_step_takes_no_step_of_the_optimizer_and_a_killed_run_goes_on_after_it(train, tmp_path) -> None:
    names, settings = ["broken", "chance", "chance"], {"steps": 6, "groups": 1}
    settings["optimizer"] = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, schedule="cosine")
    calm = train(names, **settings)
    assert [row["trained_groups"] for row in calm.rows].count(0) == 2
    taken = [row["learning_rate"] for row in calm.rows if row["trained_groups"]]
    assert taken == [1e-3 * settings["optimizer"].factor(step, 6) for step in range(4)]
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1))
    rows = {}
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            train(names, **settings, log=dying_at_the_second_row(rows), checkpoints=checkpoints)
    again = train(names, **settings, log=dying_at_the_second_row(rows), checkpoints=checkpoints)
    assert [without_time(rows[step]) for step in range(1, 7)] == [without_time(row) for row in calm.rows]
    assert again.engine.policy_version == calm.engine.policy_version == 4
    assert all(torch.equal(a, b) for a, b in zip(calm.model.parameters(), again.model.parameters(), strict=True))


def dying_at_the_second_row(rows):
    """A log into `rows`, by step, that dies before the checkpoint of its second step."""
    logged = []

    def log(row):
        rows[row["step"]] = row
        logged.append(row)
        if len(logged) == 2:
            raise KeyboardInterrupt

    return log


def without_time(row):
    return {key: value for key, value in row.items() if key != "timing"}


def test_a_group_with_one_reward_has_nothing_to_compare_and_is_not_trained_on(train) -> None:
    """Else its KL term alone would be, and it would count in the normalizer."""
    kept = []
    done = train(["single"] * 4, keep=lambda step, groups, credits: kept.extend(credits))
    assert [row["trained_groups"] for row in done.rows] == [0] and kept == [None] * 4
    assert done.rows[0]["censored"] == 4 * (GROUP - 1)


def test_a_baseline_over_the_batch_is_that_of_what_is_trained_on(train) -> None:
    kept = []
    credit = CreditConfig(advantages="reinforce_pp")
    train(["single", "chance", "chance", "chance"], credit=credit, keep=lambda step, groups, all: kept.extend(all))
    trained = [node for labels in kept if labels is not None for node in labels.nodes.values()]
    assert None in kept and any(node.positive for node in trained)
    assert sum(node.positive + node.negative for node in trained) == pytest.approx(0.0, abs=1e-6)


def test_what_checks_cost_is_kept_apart(train) -> None:
    done = train(["mixed"] * 4, steps=2, check_every=0, check=lambda step, row: Checked({}, Cost(turns=100)))
    assert done.trained.checks.turns == 200
    assert done.trained.cost.turns == done.rows[-1]["turns"] == 2 * 4 * GROUP


def test_a_step_costs_the_same_whatever_a_check_asked_before_it(train, renderer) -> None:
    """A run resumed after a check has an engine that kept nothing: neither may the run that was never killed."""
    words, few = " again" * 40, Sampling(max_tokens=4)  # long enough to be kept
    prompts = [renderer.prompt((Message("user", f"say {index}{words}"),), ()) for index in range(4)]
    settings = {"steps": 3, "check_every": 1, "words": words}
    calm = train(["mixed"] * 4, **settings)
    engines = []

    def check(step, row):
        asked = [GenerationRequest(prompt_ids=ids, sampling=few, seed=step, retain=True) for ids in prompts]
        engines[0].generate(asked)
        return Checked({"checked": step})

    checked = train(["mixed"] * 4, check=check, engines=engines, **settings)
    assert [row["checked"] for row in checked.rows] == [0, 1, 2, 3]
    assert [row["spent"] for row in checked.rows[1:]] == [row["spent"] for row in calm.rows]


def test_no_pivots_and_impossible_settings_are_refused(train) -> None:
    with pytest.raises(InputError, match="no pivot"):
        train([])
    with pytest.raises(ConfigError):
        train(["mixed"], group_size=1)


def test_the_loss_takes_the_temperature_of_sampling(train) -> None:
    cool = train(["mixed"] * 4, steps=1, sampling=Sampling(temperature=0.5, max_tokens=6))
    assert cool.rows[-1]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
