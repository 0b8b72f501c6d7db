"""A killed online run leaves the same logs as one that was not killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import FakeVllm, running
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.credit.config import CreditConfig
from turntree.engine.checkpoint import load_model
from turntree.logs import rollouts, trees
from turntree.rollout.acceptance import Acceptance
from turntree.rollout.cluster.config import WorkersConfig
from turntree.run.folder import HELD_OUT
from turntree.stages.config import Device, EpisodesCheckConfig
from turntree.stages.gradients import reasons, require_rewards
from turntree.stages.policy import resolve
from turntree.stages.train_online import GATE_LOG, TrainOnlineConfig, open_rollouts, run_train_online
from turntree.stages.verdicts import TurnVerdicts
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
        verdicts=1.0,
        max_turns=3,
        sampling=Sampling(max_tokens=12),
    ),
    teacher=Part("household"),
    verifier=Part("household"),
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
    train = replace(CONFIG.train, iterations=1, verdicts=0.0)
    config = replace(CONFIG, teacher=None, verifier=None, check=EpisodesCheckConfig(tasks=0), train=train)
    run_train_online(config, tmp_path / "run")
    with open_rollouts(config) as service:
        groups = list(service.groups(1))
    kept = list(trees.read(tmp_path / "run" / trees.FILE_NAME))
    assert [[n.token_ids for n in group.tree] for group in groups] == [[n.token_ids for n in kt.tree] for kt in kept]
    assert [group.grown.rewards.scored() for group in groups] == [kt.rewards.scored() for kt in kept]
    assert [group.trained_credit is None for group in groups] == [kt.credit is None for kt in kept]
    with pytest.raises(ConfigError) as refused, open_rollouts(CONFIG):
        pass
    assert refused.value.field == "train.verdicts"


def test_the_turns_that_episodes_took_are_judged_and_nothing_is_sampled_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same episodes, tokens and trees as without; another update from the first iteration on."""
    monkeypatch.setattr(Acceptance, "slopes", lambda self, kinds: dict.fromkeys(kinds, 0.5))  # no episode here is won
    rows: dict[float, list[dict[str, Any]]] = {}
    for weight in (0.0, 2.0):
        train = replace(CONFIG.train, verdicts=weight, **WHOLE)
        judges = {} if weight else {"teacher": None, "verifier": None}
        config = replace(CONFIG, gate=None, brancher=None, train=train, **judges)
        run_train_online(config, tmp_path / f"{weight}")
        logged = (tmp_path / f"{weight}/metrics.jsonl").read_text().splitlines()[1:]
        rows[weight] = [json.loads(line) for line in logged]
    without, judged = rows[0.0][0], rows[2.0][0]
    for key in ("decoded_tokens", "turns"):
        assert judged["spent"][key] == without["spent"][key]
    assert judged["spent"]["tool_calls"] > without["spent"]["tool_calls"], "the labels"
    assert judged["reward_mean"] == without["reward_mean"] and judged["stops"] == without["stops"]
    told = judged["local"]
    assert told["turns_judged"] + sum(told["not_judged"].values()) == judged["spent"]["turns"]
    assert min(told["accepted_by_kind"].values()) >= 0
    assert judged["loss"] != without["loss"]


@pytest.mark.parametrize("missing", ["teacher", "verifier"])
def test_judged_turns_need_a_teacher_and_a_verifier(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"'{missing}': is missing, and judged turns need it"):
        replace(CONFIG, **{missing: None})


@pytest.mark.parametrize("idle", ["teacher", "verifier"])
def test_a_judge_that_judges_nothing_is_refused(idle: str) -> None:
    train = replace(CONFIG.train, verdicts=0.0)
    kept = {"teacher": None, "verifier": None} | {idle: Part("household")}
    with pytest.raises(ConfigError, match=f"'{idle}': has no effect: no turn is judged"):
        replace(CONFIG, train=train, **kept)


def test_credit_beside_an_estimator_of_ones_own_is_refused() -> None:
    train = replace(CONFIG.train, verdicts=0.0, credit=CreditConfig(advantages="rloo"))
    with pytest.raises(ConfigError, match="an estimator of your own gives the credit"):
        replace(CONFIG, train=train, teacher=None, verifier=None, estimator=Part("mine:credit"))


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
        run_train_online(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gate_of_groups_that_begin_with_one_rollout_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gate': compares rollouts that begin independently, and one does"):
        replace(CONFIG, train=replace(CONFIG.train, initial_rollouts=1)).build_gate()


def test_turns_that_are_too_short_to_fork_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command has some eight tokens: with the paper's k = 20 no turn of a whole run forked, without a word."""
    said = []
    for probe in (12, 2):
        brancher = Part("entropy", {"probe_tokens": probe})
        train = replace(CONFIG.train, iterations=1, verdicts=0.0)
        run_train_online(
            replace(CONFIG, brancher=brancher, gate=None, teacher=None, verifier=None, train=train),
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


def test_what_the_teacher_did_not_label_is_remembered_by_a_resumed_run() -> None:
    """An outage of four episodes after many labels is no teacher that never labels."""
    first, second = (TurnVerdicts(CONFIG, *[SimpleNamespace()] * 3) for _ in range(2))
    first.unlabelled.update(turns=9, tasks=3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.unlabelled == first.unlabelled


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
    train = replace(CONFIG.train, **WHOLE, iterations=1, verdicts=0.0)
    config = replace(
        CONFIG, brancher=None, gate=None, teacher=None, verifier=None, train=train, check=EpisodesCheckConfig(tasks=0)
    )
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
    train = replace(CONFIG.train, **WHOLE, iterations=3, verdicts=0.0)
    config = replace(CONFIG, brancher=None, gate=None, teacher=None, verifier=None, train=train, filters=filters)
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
