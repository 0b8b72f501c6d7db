"""Own states on the command line: recorded and labelled, drawn by weight, searched again in training."""

import json
from dataclasses import replace

import pytest

from turntree.core.config import from_mapping
from turntree.stages import own_path
from turntree.stages.train_pivot import TrainPivotConfig, run_train_pivot

OWN = (
    "train", "pivot", "--states", "own", "--environment", "household", "--teacher", "household",
    "--verifier", "household", "--max-tokens", 24, "--refresh", 2, "--steps", 4,
    "--set", "own.tasks=3", "--set", "own.max_turns=6", "--set", "own.rollouts=4", "--set", "own.keep=0",
    "--set", "train.groups=4", "--set", "train.group_size=4", "--set", "checkpoints.every=1",
    "--set", "check.tasks=0",
)  # fmt: skip


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


def weights(run):
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(turntree, tmp_path_factory):
    run = tmp_path_factory.mktemp("own") / "run"
    turntree(*OWN, "--out", run)
    return run


def test_the_policy_is_played_labelled_and_profiled_again_every_so_many_steps(trained) -> None:
    searched = {row["step"]: row["own_path"] for row in metrics(trained) if "own_path" in row}
    assert set(searched) == {1, 3}
    for found in searched.values():
        assert found["tasks"] == 3 and found["states"] >= found["pivots"] > 0 and found["mixed"] > 0
    spent = metrics(trained)[0]["spent"]["turns"]
    assert spent > searched[1]["cost"]["turns"] > searched[1]["states"] * 4  # the search is on the bill


def test_pivots_of_earlier_searches_may_keep_a_share_of_the_draws(trained, turntree, tmp_path) -> None:
    turntree(*OWN, "--set", "own.keep=0.5", "--out", tmp_path / "run")
    rows, replaced = metrics(tmp_path / "run"), metrics(trained)
    assert rows[:2] == replaced[:2]  # up to the second search
    first, second = (row["own_path"]["pivots"] for row in rows if "own_path" in row)
    assert rows[2]["live_pivots"] == first + second > replaced[2]["live_pivots"]
    refused = turntree.error(*OWN, "--set", "own.keep=1", "--out", tmp_path / "other")
    assert "keep" in refused and "below 1" in refused


def test_a_search_may_profile_a_part_of_the_states(trained, turntree, tmp_path) -> None:
    ended = turntree(*OWN, "--set", "own.candidates=7", "--steps", 1, "--out", tmp_path / "run")
    (found,), whole = [row["own_path"] for row in metrics(tmp_path / "run") if row["step"]], metrics(trained)[0]
    assert found["profiled"] == 7 < found["states"] == whole["own_path"]["states"] == whole["own_path"]["profiled"]
    assert 0 < found["pivots"] <= 7 >= found["mixed"]
    told = f"3 episodes, {found['successes']} with success; {found['pivots']} of 7 profiled states are pivots"
    assert f"own states: {told}" in ended.stdout
    assert "candidates" in turntree.error(*OWN, "--set", "own.candidates=0", "--out", tmp_path / "other")


def test_greedy_play_reaches_the_same_states_whatever_the_seed_and_sampled_play_does_not(turntree, tmp_path) -> None:
    def reached(greedy: float, seed: int) -> list[list[str]]:
        run = tmp_path / f"{greedy}-{seed}"
        words = (*OWN, "--set", "own.count=3", "--steps", 1, "--seed", seed, "--out", run)
        config = from_mapping(TrainPivotConfig, json.loads(turntree(*words, "--dry-run").stdout)["config"])
        run_train_pivot(replace(config, own=replace(config.own, greedy=greedy)), run)
        traces = [json.loads(line) for line in (run / "own" / "traces-00001.jsonl").read_text().splitlines()[1:]]
        return sorted([message["content"] for message in trace["messages"]] for trace in traces)

    assert reached(1.0, 0) == reached(1.0, 1)
    assert reached(0.0, 0) != reached(0.0, 1)


def test_a_run_that_is_interrupted_between_two_searches_ends_with_the_same_weights(
    trained, turntree, tmp_path, monkeypatch
) -> None:
    draw = own_path.OwnStates.draw

    def dies_at_the_second(self, step, number):
        if step == 3:
            raise KeyboardInterrupt
        return draw(self, step, number)

    with monkeypatch.context() as patch:
        patch.setattr(own_path.OwnStates, "draw", dies_at_the_second)
        turntree(*OWN, "--out", tmp_path / "run", code=130)
    with monkeypatch.context() as patch:  # the first search is read again, and not made again
        patch.setattr(own_path.OwnStates, "draw", lambda self, *at: draw(self, *at) if at == (3, 1) else 1 / 0)
        turntree(*OWN, "--out", tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(trained)
    assert weights(tmp_path / "run") == weights(trained)


def test_states_that_nobody_labels_are_judged_without_a_label(turntree, tmp_path, monkeypatch) -> None:
    (tmp_path / "short.py").write_text("class Short:\n    compares = False\n    def judge(self, state, action):\n"
                                       "        return float(len(action.content) % 2)\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    place = OWN.index("--teacher")
    alone = (*OWN[:place], *OWN[place + 2 :], "--steps", 2)
    refused = turntree.error(*alone, "--out", tmp_path / "run")
    assert "teacher" in refused and "compares = False" in refused
    turntree(*alone, "--verifier", "short:Short", "--set", "own.tasks=6", "--out", tmp_path / "run")
    found = metrics(tmp_path / "run")[0]["own_path"]
    assert found["states"] >= found["mixed"] > 0 and found["pivots"] > 0


def test_recorded_and_labelled_states_go_the_way_of_traces(turntree, tmp_path) -> None:
    traces, profile, pivots = (tmp_path / f"{name}.jsonl" for name in ("traces", "profile", "pivots"))
    played = ("--environment", "household")
    turntree(
        "traces", "record", *played, "--teacher", "household", "--count", 4, "--max-turns", 8, "--max-tokens", 24,
        "--out", traces,
    )  # fmt: skip
    assert all(json.loads(line)["labels"] for line in traces.read_text().splitlines()[1:])
    turntree(
        "profile", "--traces", traces, "--verifier", "household", "--rollouts", 4, "--max-tokens", 24, "--out", profile
    )
    turntree("select", profile, "--threshold", 1.0, "--weight", "variance", "--out", pivots)
    weights = [json.loads(line)["weight"] for line in pivots.read_text().splitlines()[1:]]
    assert min(weights) > 0 and sum(weights) / len(weights) == pytest.approx(1)


def test_a_task_at_which_the_teacher_fails_is_counted_and_the_others_are_labelled(
    turntree, tmp_path, monkeypatch
) -> None:
    (tmp_path / "choosy.py").write_text(
        "from turntree import Message\nfirst = []\n"
        "def teacher(environment, history):\n    first.append(environment.task_id)\n"
        "    if environment.task_id == first[0]:\n        raise OSError('too long')\n"
        "    return Message('assistant', 'look')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    played = ("traces", "record", "--environment", "household", "--count", 5, "--max-turns", 2, "--max-tokens", 24)
    turntree(*played, "--teacher", "choosy:teacher", "--out", tmp_path / "traces.jsonl")
    labels = [bool(json.loads(line).get("labels")) for line in (tmp_path / "traces.jsonl").read_text().splitlines()[1:]]
    assert labels == [False, True, True, True, True]


def test_a_teacher_that_fails_everywhere_ends_the_command_and_not_in_a_file_without_labels(
    turntree, tmp_path, monkeypatch
) -> None:
    (tmp_path / "broken.py").write_text("def teacher(environment, history):\n    raise OSError('the server is down')\n")
    monkeypatch.syspath_prepend(tmp_path)
    played = ("traces", "record", "--environment", "household", "--count", 5, "--max-turns", 2, "--max-tokens", 24)
    said = turntree.error(*played, "--teacher", "broken:teacher", "--out", tmp_path / "traces.jsonl")
    assert "teacher" in said and "the server is down" in said and not (tmp_path / "traces.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "pivots"),
        (("--states", "own"), "--environment"),
        (("--states", "own", "--environment", "household"), "--verifier"),
        (("--states", "own", "--environment", "household", "--verifier", "household"), "--teacher"),
    ],
)
def test_what_own_states_need_is_asked_for_by_name(turntree, tmp_path, arguments, said) -> None:
    assert said in turntree.error("train", "pivot", *arguments, "--out", tmp_path / "run")


def test_a_search_that_finds_nothing_at_all_ends_the_run_with_the_reasons(turntree, tmp_path) -> None:
    wrong = [*OWN, "--teacher", "qa", "--out", tmp_path / "run"]
    message = turntree.error(*wrong)
    assert "no state of the policy's own path is a pivot" in message and "not a generated question" in message
