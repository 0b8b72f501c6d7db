"""`traces record` and the verifier `executed`, on an environment of a user's own that has no `fork`."""

import json

import pytest

from completions_server import completion, serve
from turntree.traces.schema import read_traces
from turntree_worlds.household.entry import POLICY as EMBEDDED

ROOMS = '''
import dataclasses
from turntree_worlds.household.distance import distance
from turntree_worlds.household.entry import Household
from turntree_worlds.household.environment import HouseholdEnvironment

class Room:
    """A household game, as somebody would bring it: without a fork. `lasts`: how many commands it survives."""
    tools = ()
    def __init__(self, game, lasts):
        self.inner, self.lasts = HouseholdEnvironment(game), lasts
        self.task_id, self.task_type = game.id, game.task_type
    def reset(self):
        return self.inner.reset()
    def step(self, action):
        self.lasts -= 1
        if self.lasts < 0:
            raise RuntimeError("the room is on fire")
        answer = self.inner.step(action)
        return dataclasses.replace(answer, progress=1 / (1 + distance(self.inner._state)))
    def state(self):
        return self.inner.state()

def tasks(split, count, *, seed, lasts: int = 1000, burning: int = 0):
    with Household(offset=seed).open({split: count}, seed=0) as opened:
        chosen = [task.world.game for task in opened.of(split)]
    return [Room(game, 2 if number < burning else lasts) for number, game in enumerate(chosen)]
'''
SHORT = ("--max-turns", 8, "--max-tokens", 24)


@pytest.fixture(scope="module")
def rooms(turntree, tmp_path_factory):
    """A folder with the module and traces of the embedded policy in it."""
    folder = tmp_path_factory.mktemp("rooms")
    (folder / "my_rooms.py").write_text(ROOMS)
    return folder


def record(out, *more, count=6):
    return ("traces", "record", "--environment", "my_rooms:tasks", "--count", count, *SHORT, "--out", out, *more)


@pytest.fixture(scope="module")
def recorded(turntree, rooms):
    turntree(*record("traces.jsonl", "--samples", 2), cwd=rooms)
    return rooms / "traces.jsonl"


def header_of(path):
    return json.loads(path.read_text().splitlines()[0])


def test_a_trace_holds_all_that_is_known_of_its_episode(recorded):
    traces, header = list(read_traces(recorded)), header_of(recorded)
    assert header["traces"] == len(traces) == 12 and header["counts"]["episodes"] == 12
    assert header["config"]["environment"] == {"name": "my_rooms:tasks", "lasts": 1000, "burning": 0}
    for trace in traces:
        assert trace.messages[0].role == "user" and len(trace.turn_positions) <= 8
        assert trace.split == "train" and trace.id.startswith(trace.group + "/")
        assert trace.meta["reward"] == float(trace.success) and trace.meta["tool_errors"] == 0
        assert trace.meta["task_type"]
        place = {"split": "train", "count": 6, "seed": 0, "model": "default", "task_id": trace.group}
        assert trace.environment == {"name": "my_rooms:tasks", "lasts": 1000, "burning": 0, **place}
    assert len({trace.group for trace in traces}) == 6


def test_successes_only_and_failures_are_counted_and_never_written(turntree, rooms, recorded):
    result = turntree.json(*record("won.jsonl", "--samples", 2, "--only", "successes"), cwd=rooms)
    won = [trace for trace in read_traces(recorded) if trace.success]
    assert [trace.id for trace in read_traces(rooms / "won.jsonl")] == [trace.id for trace in won]
    assert result["dropped: not a success"] == 12 - len(won)
    result = turntree.json(*record("fire.jsonl", "--burning", 2), cwd=rooms)
    assert result["dropped: failed (RuntimeError: the room is on fire)"] == 2
    assert result["traces"] == 4 == len(list(read_traces(rooms / "fire.jsonl")))
    message = turntree.error(*record("none.jsonl", "--set", "environment.lasts=1"), cwd=rooms)
    assert "no episode is kept" in message and "6 dropped: failed (RuntimeError: the room is on fire)" in message
    assert not list(rooms.glob("none*"))


def test_a_recording_that_was_stopped_goes_on_and_ends_with_the_same_file(turntree, rooms, recorded, monkeypatch):
    from turntree.stages import record as stage

    whole, waves = stage._played, []
    arguments = record("again.jsonl", "--samples", 2, "--set", "wave=2")

    def stopping(*given):
        waves.append(given)
        if len(waves) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    with monkeypatch.context() as patched:
        patched.setattr(stage, "_played", stopping)
        stopped = turntree(*arguments, cwd=rooms, code=130)
    assert "2 of 6 tasks are kept" in stopped.stderr and not (rooms / "again.jsonl").exists()
    assert "seed (0, not 5)" in turntree.error(*arguments, "--seed", 5, cwd=rooms)
    assert "2 of 6 tasks are done" in turntree(*arguments, cwd=rooms).stderr
    assert (rooms / "again.jsonl").read_text().splitlines()[1:] == recorded.read_text().splitlines()[1:]
    assert not list(rooms.glob("*.waves"))


def test_a_server_plays_too_and_cut_turns_are_read_again_but_not_learned(turntree, rooms):
    def answer(asked):
        return completion("look", reason="length" if len(asked["prompt"]) % 2 else "stop")

    with serve(answer) as server:
        where = ("--endpoint", server.url, "--model", "served", "--tokenizer", EMBEDDED)
        judged = ("--set", "episodes.cut_turns=judge")  # so that the episodes go on
        turntree(*record("served.jsonl", *where, *judged, count=3), cwd=rooms)
        assert "--tokenizer" in turntree.error(*record("x.jsonl", "--endpoint", server.url), cwd=rooms)
    for trace in read_traces(rooms / "served.jsonl"):
        spoken = [message for message in trace.messages if message.role == "assistant"]
        assert len(spoken) == 8 and {message.content for message in spoken} == {"look"}
        cut = {str(turn) for turn, message in enumerate(spoken) if message.cut}
        assert set(trace.meta.get("skip_turns", {})) == cut
    assert header_of(rooms / "served.jsonl")["policy_hash"] == "endpoint:served"


def test_wrong_names_and_options_are_one_line(turntree, rooms):
    assert "did you mean 'lasts'?" in turntree.error(*record("x.jsonl", "--set", "environment.last=1"), cwd=rooms)
    arguments = ("traces", "record", "--environment", "my_rooms:task", "--out", "x.jsonl")
    assert "has no 'task'" in turntree.error(*arguments, cwd=rooms)


# from one's own environment to training


@pytest.fixture(scope="module")
def pivots(turntree, rooms, recorded):
    profile = ("profile", "--traces", recorded, "--limit", 24, "--rollouts", 6, "--max-tokens", 24)
    turntree(
        *(*profile, "--verifier", "executed", "--environment", "my_rooms:tasks", "--out", rooms / "profile.jsonl"),
        cwd=rooms,
    )
    turntree("select", rooms / "profile.jsonl", "--threshold", 1.0, "--out", rooms / "pivots.jsonl")
    return rooms / "pivots.jsonl"


def test_a_profile_by_execution_accepts_every_demonstration_and_says_who_judged(pivots, rooms):
    header, *rows = (json.loads(line) for line in (rooms / "profile.jsonl").read_text().splitlines())
    assert header["verifier"].startswith("executed/1+compare=either+environment=my_rooms:tasks@")
    assert header["summary"]["gold_refused"] == header["summary"]["unjudged"] == 0
    accepted = [action for row in rows for action in row["actions"] if action["reward"]]
    assert any(action["strict"] == 0 for action in accepted), "another text with the same effect"
    refused = [action for row in rows for action in row["actions"] if action["reward"] == 0]
    assert refused and not any(action["strict"] for action in refused)


def test_training_by_execution_goes_on_after_a_stop_and_names_its_environment_itself(
    turntree, pivots, rooms, monkeypatch
):
    import turntree.train.pivot as training

    arguments = ("train", "pivot", pivots, "--steps", 2, "--max-tokens", 24, "--set", "train.groups=2")
    arguments = (*arguments, "--set", "train.group_size=4", "--set", "checkpoints.every=1", "--set", "check.tasks=0")
    message = turntree.error(*arguments, "--out", rooms / "run", cwd=rooms)
    assert "--environment" in message  # a file does not decide what code runs
    named = (*arguments, "--environment", "my_rooms:tasks")
    turntree(*named, "--out", rooms / "calm", cwd=rooms)
    whole, steps = training.score_wave, []

    def stopping(*given, **named):
        steps.append(given)
        if len(steps) == 2:  # in the second step
            raise KeyboardInterrupt
        return whole(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(training, "score_wave", stopping)
        turntree(*named, "--out", rooms / "run", cwd=rooms, code=130)
    turntree(*named, "--out", rooms / "run", cwd=rooms)
    calm, stopped = (
        [json.loads(line)["reward_mean"] for line in (rooms / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("calm", "run")
    )
    assert calm == stopped and len(calm) == 2
    rooms.joinpath("my_rooms.py").write_text(ROOMS + "\n# edited\n")
    try:
        assert "were profiled with verifier" in turntree.error(*named, "--out", rooms / "other", cwd=rooms)
    finally:
        rooms.joinpath("my_rooms.py").write_text(ROOMS)


def test_judging_anew_by_execution_is_profiling_by_it(turntree, pivots, rooms):
    shape = ("rescore", rooms / "profile.jsonl", "--out", rooms / "strict.jsonl", "--verifier", "strict")
    turntree(*shape)
    named = ("--verifier", "executed", "--environment", "my_rooms:tasks")
    turntree("rescore", rooms / "strict.jsonl", *named, "--out", rooms / "back.jsonl", cwd=rooms)
    rows = [(rooms / name).read_text().splitlines()[1:] for name in ("profile.jsonl", "back.jsonl")]
    assert rows[0] == rows[1]


def test_recorded_games_are_judged_by_both_and_execution_accepts_no_more_than_the_domain(turntree, tmp_path):
    """The embedded policy's own episodes, through the registered name."""
    arguments = ("traces", "record", "--environment", "household", "--difficulty", "easy", "--count", 4, *SHORT)
    turntree(*arguments, "--out", tmp_path / "t.jsonl")
    shape = ("profile", "--traces", tmp_path / "t.jsonl", "--limit", 24, "--rollouts", 6, "--max-tokens", 24)
    turntree(*shape, "--verifier", "household", "--out", tmp_path / "domain.jsonl")
    named = ("--verifier", "executed", "--environment", "household", "--out", tmp_path / "executed.jsonl")
    turntree("rescore", tmp_path / "domain.jsonl", *named)
    pairs = [
        (domain["reward"], executed["reward"])
        for one, other in zip(*(read_table(tmp_path / f"{name}.jsonl") for name in ("domain", "executed")), strict=True)
        for domain, executed in zip(one["actions"], other["actions"], strict=True)
    ]
    assert (1.0, 1.0) in pairs and (0.0, 0.0) in pairs and (0.0, 1.0) not in pairs


def read_table(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]
