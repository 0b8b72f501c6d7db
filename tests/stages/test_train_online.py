"""A killed online run leaves the same logs as one that was not killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_vllm import FakeVllm, running
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.outcome import GroupOutcome
from turntree.credit.config import CreditConfig
from turntree.engine.checkpoint import load_model
from turntree.logs import rollouts, trees
from turntree.rollout import service
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.episode_figures import outcome_of
from turntree.run.folder import HELD_OUT
from turntree.stages.config import Device, EpisodesCheckConfig
from turntree.stages.gradients import reasons, require_rewards
from turntree.stages.policy import resolve
from turntree.stages.train_online import GATE_LOG, TrainOnlineConfig, open_rollouts, run_train_online
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.online import OnlineConfig
from turntree_worlds.household.environment import HouseholdEnvironment

LOGS = (rollouts.FILE_NAME, trees.FILE_NAME, GATE_LOG, HELD_OUT)
WHOLE: dict[str, Any] = {"group_size": 3, "initial_rollouts": None}
CONFIG = TrainOnlineConfig(
    count=3,
    check=EpisodesCheckConfig(tasks=1),
    train=OnlineConfig(
        iterations=3,
        groups=2,
        check_every=1,
        group_size=3,
        initial_rollouts=2,
        turn_rewards={"progress": 2.0},
        max_turns=3,
        sampling=Sampling(max_tokens=12),
    ),
    brancher=Part("entropy", {"probe_tokens": 2}),  # paced: it remembers earlier iterations
    gate=Part("divergence", {"turn": 2, "threshold": 0.5, "audit": 0.5}),
    checkpoints=CheckpointConfig(every=1),
)


def without_timing(value: Any) -> Any:
    if isinstance(value, list):
        return [without_timing(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: without_timing(inner) for key, inner in value.items() if key != "timing"}


def rows(path: Path) -> list[Any]:
    return [without_timing(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_a_killed_run_had_logged_after_its_checkpoint_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_train_online(CONFIG, tmp_path / "calm")
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *state: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt
        save(self, step, *state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", killed)
        run_train_online(CONFIG, tmp_path / "killed")
    for name in LOGS:
        with (tmp_path / "killed" / name).open("a", encoding="utf-8") as log:
            log.write('{"iteration": 2, "half of a r')
    run_train_online(CONFIG, tmp_path / "killed")
    for name in (*LOGS, "metrics.jsonl"):
        logged = rows(tmp_path / "calm" / name)
        assert {row["iteration"] for row in logged if "iteration" in row} >= {2, 3} or name == "metrics.jsonl"
        assert rows(tmp_path / "killed" / name) == logged
    bills = [json.loads((tmp_path / run / "cost.json").read_text(encoding="utf-8")) for run in ("calm", "killed")]
    assert without_timing(bills[0]) == without_timing(bills[1])


def test_another_trainer_gets_the_groups_of_the_run(tmp_path: Path) -> None:
    train = replace(CONFIG.train, iterations=1)
    config = replace(CONFIG, check=EpisodesCheckConfig(tasks=0), train=train)
    run_train_online(config, tmp_path / "run")
    with open_rollouts(config) as service:
        groups = list(service.groups(1))
    kept = list(trees.read(tmp_path / "run" / trees.FILE_NAME))
    assert [[n.token_ids for n in group.tree] for group in groups] == [[n.token_ids for n in kt.tree] for kt in kept]
    assert [group.grown.rewards.scored() for group in groups] == [kt.rewards.scored() for kt in kept]
    assert [group.trained_credit is None for group in groups] == [kt.credit is None for kt in kept]
    with pytest.raises(ConfigError) as refused, open_rollouts(replace(CONFIG, cluster=WorkersConfig(workers=1))):
        pass
    assert refused.value.field == "cluster.workers"


def test_what_the_environment_says_of_turns_teaches_where_all_episodes_fail(tmp_path: Path) -> None:
    """The same episodes as without, and another update from the first iteration on."""
    rows: dict[float, dict[str, Any]] = {}
    for weight in (0.0, 2.0):
        train = replace(CONFIG.train, turn_rewards={"progress": weight} if weight else {}, **WHOLE)
        run_train_online(replace(CONFIG, gate=None, brancher=None, train=train), tmp_path / f"{weight}")
        rows[weight] = json.loads((tmp_path / f"{weight}/metrics.jsonl").read_text().splitlines()[1])
    without, rewarded = rows[0.0], rows[2.0]
    assert rewarded["spent"] == without["spent"] and rewarded["reward_mean"] == without["reward_mean"] == 0.0
    assert without["zero_variance_fraction"] == 1.0 > rewarded["zero_variance_fraction"]
    assert rewarded["loss"] != without["loss"] == 0.0


@pytest.mark.parametrize("filters", [(), (Part("dapo"),)])
def test_the_filter_of_equal_rewards_keeps_a_group_whose_turns_differ(tmp_path: Path, filters: Any) -> None:
    train = replace(CONFIG.train, iterations=1, **WHOLE)
    run_train_online(replace(CONFIG, gate=None, brancher=None, train=train, filters=filters), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert row["reward_mean"] == 0.0 and row["trained_groups"] > 0 and row["grad_norm"] > 0


def test_a_reward_that_the_environment_never_says_is_refused_with_those_that_it_says(tmp_path: Path) -> None:
    train = replace(CONFIG.train, turn_rewards={"progres": 1.0})
    with pytest.raises(ConfigError) as refused:
        run_train_online(replace(CONFIG, train=train), tmp_path / "run")
    assert refused.value.field == "train.turn_rewards.progres" and "invalid, progress" in str(refused.value)
    for wrong in ({"turn_rewards": {"invalid": float("nan")}}, {"turn_discount": 1.5}):
        with pytest.raises(ConfigError) as refused:
            replace(CONFIG.train, **wrong)
        assert next(iter(wrong)) in str(refused.value.field)


def test_a_name_is_looked_up_in_the_first_iteration_that_teaches(tmp_path: Path, monkeypatch: Any) -> None:
    """Where tools were down in those before it, nothing was said that names could be compared with."""
    left = [1]  # of the groups that have an outcome

    def outcome(group: Any) -> GroupOutcome:
        left[0] += 1
        return GroupOutcome.CENSORED if left[0] <= 3 else outcome_of(group)

    monkeypatch.setattr(service, "outcome_of", outcome)
    train = replace(CONFIG.train, turn_rewards={"progres": 1.0}, **WHOLE)
    with pytest.raises(ConfigError) as refused:
        run_train_online(replace(CONFIG, gate=None, brancher=None, train=train), tmp_path / "run")
    assert refused.value.field == "train.turn_rewards.progres"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2  # the start, and iteration 1


def test_credit_beside_an_estimator_of_ones_own_is_refused() -> None:
    train = replace(CONFIG.train, credit=CreditConfig(advantages="rloo"))
    with pytest.raises(ConfigError, match="an estimator of your own gives the credit"):
        replace(CONFIG, train=train, estimator=Part("mine:credit"))


@pytest.mark.parametrize("rollouts", [{"group_size": 2}, {"group_size": 4, "initial_rollouts": 1}])
def test_starts_are_not_compared_where_only_one_begins(rollouts: dict[str, int]) -> None:
    credit = CreditConfig(advantages="rloo", comparison="starts")
    settings: dict[str, Any] = {"credit": credit, "initial_rollouts": None, **rollouts}
    with pytest.raises(ConfigError, match=r"'train.initial_rollouts': 1 rollout begins independently"):
        replace(CONFIG, train=replace(CONFIG.train, **settings))
    replace(CONFIG, train=replace(CONFIG.train, **{**settings, "group_size": 5, "initial_rollouts": 2}))


LATE = {"turn": 3, "threshold": 0.5}


@pytest.mark.parametrize(
    ("gate", "refused"),
    [
        (Part("divergence"), "first looks at turn 10, and episodes end at turn 3"),
        (Part("divergence", {**LATE, "audit": 0.5}), "first looks at turn 3"),
        (Part("random"), "first looks at turn 10"),
        (Part("divergence", {**LATE, "turn": 2}), None),
        (Part("random", {"turn": 2}), None),
    ],
)
def test_a_gate_that_never_looks_is_refused(gate: Part, refused: str | None, tmp_path: Path) -> None:
    config = replace(CONFIG, gate=gate)
    if refused is None:
        assert config.build_gate() is not None
        return
    with pytest.raises(ConfigError, match=rf"'gate': {refused}"):
        run_train_online(replace(config, model=str(tmp_path / "absent")), tmp_path / "run")  # no model is loaded for it
    assert not (tmp_path / "run").exists()


def test_a_gate_of_groups_that_begin_with_one_rollout_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gate': compares rollouts that begin independently, and one does"):
        replace(CONFIG, train=replace(CONFIG.train, initial_rollouts=1)).build_gate()


def test_turns_that_are_too_short_to_fork_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command has some eight tokens: with the paper's k = 20 no turn of a whole run forked, without a word."""
    said = []
    for probe in (12, 2):
        brancher = Part("entropy", {"probe_tokens": probe})
        train = replace(CONFIG.train, iterations=1)
        run_train_online(
            replace(CONFIG, brancher=brancher, gate=None, train=train),
            tmp_path / f"{probe}",
        )
        said.append("no turn could fork" in capfd.readouterr().err)
    assert said == [True, False]
    for rule in ("entropy", "random"):
        with pytest.raises(ConfigError, match=r"'brancher.probe_tokens': looks at the first 13 tokens .* end at 12"):
            replace(CONFIG, brancher=Part(rule, {"probe_tokens": 13})).build_brancher(100)
        replace(CONFIG, brancher=Part(rule, {"probe_tokens": 12})).build_brancher(100)


def test_servers_get_no_whole_weights_while_workers_sample_from_earlier_ones(tmp_path: Path) -> None:
    """They hold one set of them."""
    with running(FakeVllm(load_model(resolve("household")))) as url:
        train = replace(CONFIG.train, max_off_policy_steps=1)
        device = Device(engine=Part("vllm", {"url": url}))
        with pytest.raises(ConfigError) as caught:
            run_train_online(
                replace(CONFIG, train=train, cluster=WorkersConfig(workers=2), device=device), tmp_path / "run"
            )
    assert caught.value.field == "train.max_off_policy_steps"
    assert "device.lora" in str(caught.value) and not (tmp_path / "run").exists()


def test_an_episode_that_may_be_too_long_to_train_on_is_refused_before_the_first_one(tmp_path: Path) -> None:
    """It would end the run at the first one that is, and a resumed run again."""
    with pytest.raises(ConfigError, match=r"'train.max_tokens': 200 tokens are fewer than an episode may have \(\d+\)"):
        run_train_online(replace(CONFIG, train=replace(CONFIG.train, max_tokens=200)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_no_rollout_has_a_reward_says_so_at_once_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(self: Any, action: Any) -> Any:
        raise RuntimeError("the room is on fire")

    monkeypatch.setattr(HouseholdEnvironment, "step", step)
    config = replace(CONFIG, brancher=None, gate=None, train=replace(CONFIG.train, **WHOLE, iterations=2))
    with pytest.raises(InputError, match=r"no rollout of the run has a reward.* \(12 x .*the room is on fire"):
        run_train_online(config, tmp_path / "run")
    said = capfd.readouterr().err
    assert said.count("warning: step 1: no rollout has a reward, so nothing was trained (6 x ") == 1


def test_held_out_checks_can_be_switched_off(tmp_path: Path) -> None:
    train = replace(CONFIG.train, **WHOLE, iterations=1)
    config = replace(CONFIG, brancher=None, gate=None, train=train, check=EpisodesCheckConfig(tasks=0))
    assert run_train_online(config, tmp_path / "run")["held_out_success"] is None
    assert not any(key.startswith("held_out") for row in rows(tmp_path / "run" / "metrics.jsonl") for key in row)


def test_a_run_with_some_rewards_is_a_success() -> None:
    lost = {"step": 1, "reward_mean": None, "censored_reasons": {"fire": 8}}
    rest = {"step": 2, "reward_mean": 0.0, "censored_reasons": {"fire": 4, "flood": 2}}
    require_rewards([{"step": 0}, lost, rest])
    assert reasons([lost, rest]) == {"fire": 12, "flood": 2}
    require_rewards([{"step": 1, "reward_mean": None, "censored_reasons": {}}])  # a search that found nothing


@pytest.mark.parametrize("filters", [(), (Part("dapo"),)])
def test_a_run_in_which_no_group_has_a_gradient_says_why_early_and_at_its_end(
    filters: tuple[Part, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = HouseholdEnvironment.step

    def step(self: Any, action: Any) -> Any:
        return replace(played(self, action), done=True, success=False)

    monkeypatch.setattr(HouseholdEnvironment, "step", step)
    train = replace(CONFIG.train, **WHOLE, iterations=3, turn_rewards={})
    config = replace(CONFIG, brancher=None, gate=None, train=train, filters=filters)
    run_train_online(config, tmp_path / "run")
    said = capfd.readouterr().err
    assert said.count("warning: step 3: no group has had a gradient so far: every reward is 0; look at what") == 1
    assert said.count("no group of the run had a gradient, so the policy is that of the start: every reward is 0") == 1
    assert "learning-rate" not in said


def test_a_part_that_is_refused_leaves_no_folder_which_the_corrected_command_would_not_take(tmp_path: Path) -> None:
    config = TrainOnlineConfig(
        environment=Part("household"),
        brancher=Part("random", {"rate": 3.0}),
        train=OnlineConfig(iterations=1, sampling=Sampling(max_tokens=24)),
    )
    with pytest.raises(ConfigError, match=r"'brancher\.rate'"):
        run_train_online(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
