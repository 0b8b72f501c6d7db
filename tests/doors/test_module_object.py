"""Every part that turntree decides with, from files outside the package, by `module:object` and the command line:
train, kill, resume, evaluate, report. No file of turntree is edited."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doors.parts_of_ones_own import MODULES
from turntree.traces.schema import read_traces
from turntree.train.checkpoints import Checkpoints

TINY = (
    *("--iterations", 2, "--groups", 2, "--group-size", 4, "--max-turns", 3, "--max-tokens", 12, "--count", 4),
    *("--held-out-count", 2, "--learning-rate", 3e-4, "--kl", 0, "--set", "checkpoints.every=1"),
)
ROOMS = ("--environment", "door_rooms:tasks", "--turns", 3)
MINE = (
    *("--gate", "door_rules:CutsAlike", "--set", "gate.turn=3"),
    *("--brancher", "door_rules:EveryOther", "--initial", 2),
    *("--estimator", "door_rules:centred", "--set", "estimator.scale=0.5"),
    *("--filter", "door_rules:Bored", "--set", "filters.0.after=1", "--renderer", "door_words:Marked"),
    *("--reward", "door_rules:brief=0.5", "--reward", "environment"),
    *("--log", "door_machinery:Lines"),
)
ENGINE = ("--engine", "door_machinery:Counting", "--set", "device.engine.rows=32")
ONLINE = ("train", "online", *ROOMS, *TINY, *MINE, *ENGINE)
SHORT = ("--max-tokens", 12)


def rows(path: Path) -> list[dict[str, Any]]:
    return [untimed(json.loads(line)) for line in path.read_text().splitlines()]


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key != "timing"}
    return [untimed(item) for item in value] if isinstance(value, list) else value


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Training dies when it would save this step: everything up to it is logged, and what is saved is older."""
    save = Checkpoints.save

    def stopping(self: Checkpoints, now: int, *state: Any) -> None:
        if now == step:
            raise KeyboardInterrupt
        save(self, now, *state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopping)
        yield


@contextmanager
def edited(folder: Path, module: str) -> Iterator[None]:
    path = folder / f"{module}.py"
    path.write_text(path.read_text() + "\n# edited\n")
    try:
        yield
    finally:
        path.write_text(MODULES[module])


@pytest.fixture(scope="module")
def whole(turntree, folder) -> Path:
    """A run that nothing interrupted, with every part of one's own."""
    sys.modules.pop("door_machinery", None)
    turntree(*ONLINE, "--out", "whole")
    return folder / "whole"


@pytest.fixture(scope="module")
def killed(turntree, folder) -> Path:
    """The same run, killed in its second iteration."""
    with killed_at(2):
        turntree(*ONLINE, "--out", "killed", code=130)
    return folder / "killed"


def test_every_part_of_ones_own_does_its_work(whole) -> None:
    started, *trained = rows(whole / "metrics.jsonl")
    assert started["held_out_short_share"] is not None, "the environment counts for itself"
    assert all(set(row["rewards"]) == {"brief", "environment"} for row in trained)
    assert sum(row["trees"]["forks"] for row in trained) > 0, "the brancher"
    assert {row["reason"] for row in rows(whole / "gate.jsonl")} == {"alike"}
    assert [row["step"] for row in rows(whole / "told.jsonl")] == [0, 1, 2], "the logger"
    assert trained[1]["prompts_skipped"].keys() | trained[0]["groups_dropped"].keys() <= {"dull", "alike"}, "the filter"
    kept = rows(whole / "trees.jsonl")
    credits = [credit for tree in kept for credit in (tree["credit"] or {"nodes": {}})["nodes"].values()]
    assert credits and len(kept) == 4
    config = json.loads((whole / "config.json").read_text())
    assert config["config"]["estimator"] == {"name": "door_rules:centred", "scale": 0.5}
    assert config["config"]["device"]["engine"] == {"name": "door_machinery:Counting", "rows": 32}


def test_an_engine_of_ones_own_is_told_of_every_update_and_its_numbers_are_not_trusted(turntree, folder, whole) -> None:
    (engine,) = sys.modules["door_machinery"].Counting.built[:1]
    assert engine.updates == [1, 2] and engine.rows == 32
    trained = [row for row in rows(whole / "metrics.jsonl") if "ratio_max" in row]
    assert trained and all(row["ratio_max"] == 1 for row in trained), "old log-probabilities are the trainer's own"
    turntree("train", "online", *ROOMS, *TINY, *MINE, "--out", "ours")
    assert json.loads((folder / "ours" / "cost.json").read_text())["scored_tokens"] == 0
    for one, other in zip(
        rows(whole / "rollouts.jsonl")[:2], rows(folder / "ours" / "rollouts.jsonl")[:2], strict=True
    ):
        assert one == other, "the same model, sampled by the same draws"


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("door_rooms", "inputs.environment"),
        ("door_rules", "inputs.brancher"),
        ("door_machinery", "inputs.device.engine"),
        ("door_words", "inputs.device.renderer"),
    ],
)
def test_a_run_does_not_go_on_with_a_module_that_was_edited(turntree, folder, killed, module, named) -> None:
    with edited(folder, module):
        message = turntree.error(*ONLINE, "--out", "killed")
    assert f"differs in {named}" in message


def test_a_killed_run_goes_on_to_the_same_artifacts(turntree, folder, whole, killed) -> None:
    assert "resumes after step 1" in turntree(*ONLINE, "--out", "killed").stderr
    weights = "model/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    for name in ("metrics.jsonl", "rollouts.jsonl", "trees.jsonl", "held_out.jsonl", "gate.jsonl"):
        assert rows(killed / name) == rows(whole / name), name
    assert [row["step"] for row in rows(killed / "told.jsonl")] == [0, 1, 2], "no step is told twice"


def test_it_is_evaluated_and_reported_like_any_other(turntree, folder, whole) -> None:
    result = turntree.json(
        *("evaluate", *ROOMS, "--model", "whole/model", "--count", 3, "--max-turns", 3, *SHORT),
        *("--engine", "door_machinery:Counting"),
    )
    assert set(result["sampled"]["by_task_type"]) <= {"look", "inventory", "go"}
    assert result["greedy"]["short_share"] is not None
    assert result["config"]["device"]["engine"]["name"] == "door_machinery:Counting"
    trained = json.loads((whole / "config.json").read_text())["inputs"]
    code = ("environment", "device.engine", "tokenizer_hash", "template_hash")
    assert {name: result["inputs"][name] for name in code} == {name: trained[name] for name in code}
    assert "@" in result["inputs"]["environment"], "the digest of the file that was played"
    turntree("report", "whole")
    assert "room-" in (folder / "whole" / "trees.html").read_text()
    assert (folder / "whole" / "report.html").stat().st_size > 1000


# from recorded traces to training at pivots


@pytest.fixture(scope="module")
def traces(turntree, folder) -> Path:
    turntree(
        *("traces", "record", "--environment", "door_rooms:tasks", "--set", "environment.turns=3", "--count", 6),
        *("--samples", 2, *SHORT, "--engine", "door_machinery:Counting", "--out", "traces.jsonl"),
    )
    return folder / "traces.jsonl"


PROFILE = ("profile", "--limit", 8, "--rollouts", 8, *SHORT, "--engine", "door_machinery:Counting")
PIVOT = ("--steps", 2, *SHORT, "--set", "train.groups=2", "--set", "train.group_size=4", "--set", "checkpoints.every=1")
PIVOT = (*PIVOT, "--set", "check.tasks=0")


@pytest.mark.parametrize("verifier", ["door_rules:begins_alike", "executed"])
def test_a_verifier_profiles_selects_and_trains_and_goes_on_after_a_kill(turntree, folder, traces, verifier) -> None:
    name = verifier.partition(":")[0]
    named = ("--verifier", verifier, *(("--environment", "door_rooms:tasks") if verifier == "executed" else ()))
    profiled = turntree.json(*PROFILE, "--traces", traces, *named, "--out", f"{name}.profile.jsonl")
    assert profiled["candidates"] == 8 and profiled["gold_refused"] == 0
    turntree("select", f"{name}.profile.jsonl", "--threshold", 1, "--anchor-share", 0.5, "--out", f"{name}.jsonl")
    command = ("train", "pivot", f"{name}.jsonl", *PIVOT, *named, "--engine", "door_machinery:Counting")
    with killed_at(2):
        turntree(*command, "--out", f"{name}.run", code=130)
    with edited(folder, "door_machinery"):
        assert "differs in inputs.device.engine" in turntree.error(*command, "--out", f"{name}.run")
    turntree(*command, "--out", f"{name}.run")
    turntree(*command, "--out", f"{name}.whole")
    one, other = (folder / f"{name}.{run}" for run in ("run", "whole"))
    assert (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
    assert rows(one / "metrics.jsonl") == rows(other / "metrics.jsonl")
    turntree("report", f"{name}.run")


def test_a_trace_format_reads_foreign_logs_and_what_it_leaves_out_is_counted(turntree, folder, traces) -> None:
    recorded = list(read_traces(traces))
    said = {"assistant": "bot", "user": "world"}
    logs = [
        {"name": trace.id, "won": trace.success, "talk": [[said[m.role], m.content] for m in trace.messages]}
        for trace in recorded
    ]
    (folder / "logs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*logs, {"note": "the end"}]))
    command = ("traces", "import", "logs.jsonl", "--out", "imported.jsonl", "--format", "door_machinery:read")
    result = turntree.json(*command, "--set", "format.agent=bot")
    assert result["dropped_traces"] == {"left_out_by_format": 1} and result["traces_kept"] == len(recorded)
    read = list(read_traces(folder / "imported.jsonl"))
    assert [(trace.id, trace.messages, trace.success) for trace in read] == [
        (trace.id, trace.messages, trace.success) for trace in recorded
    ]
    message = turntree.error(*command)
    assert "logs.jsonl:1: cannot be read: format 'door_machinery:read' raised KeyError: 'bot'" in message
    assert turntree.json(*command, "--set", "format.agent=bot", "--on-error", "drop")["traces_kept"] == len(recorded)
    assert "'format.agnt': unknown key; did you mean 'agent'?" in turntree.error(*command, "--set", "format.agnt=bot")


def test_a_demonstrator_is_a_command_and_what_it_leaves_out_is_counted(turntree, folder) -> None:
    command = ("traces", "my_demonstrations:Rooms", "--count", 5, "--set", "closed=2", "--out", "shown.jsonl")
    result = turntree.json(*command)
    counts = {"rooms": 5, "dropped: closed": 2, "traces": 3, "turns": 3}
    assert {key: value for key, value in result.items() if key != "path"} == counts
    assert [trace.id for trace in read_traces(folder / "shown.jsonl")] == ["room-2", "room-3", "room-4"]
    header = json.loads((folder / "shown.jsonl").read_text().splitlines()[0])
    assert header["made_by"] == "my_demonstrations:Rooms" and header["config"] == {"count": 5, "closed": 2}
    assert "Somebody who knows the way." in turntree("traces", "my_demonstrations:Rooms", "--help").stdout
    listed = {row["key"]: row for row in turntree.json("config", "traces", "my_demonstrations:Rooms")["keys"]}
    assert (
        listed["count"]["option"] == "--count" and listed["closed"]["meaning"] == "How many of them nobody gets into."
    )


def test_what_demonstrates_nothing_is_refused(turntree, folder) -> None:
    out = ("--out", "none.jsonl")
    assert "gave dict, not traces" in turntree.error("traces", "my_demonstrations:Nonsense", *out)
    assert "'my_demonstrations:plain' is not a dataclass" in turntree.error("traces", "my_demonstrations:plain", *out)
    assert "keeps no trace" in turntree.error("traces", "my_demonstrations:Rooms", "--set", "closed=4", *out)
    assert not (folder / "none.jsonl").exists()


# filters, renderers and log formats


def test_a_filter_of_ones_own_skips_drops_and_remembers_after_a_kill(turntree, folder) -> None:
    """Most groups of two rollouts end alike, so much is dropped, and skipped in even iterations."""
    command = (
        *("train", "online", *ROOMS, *TINY, "--iterations", 4, "--count", 2, "--group-size", 2),
        *("--filter", "door_rules:Bored", "--filter", "dapo", "--set", "filters.1.refill_cap=0.5"),
    )
    turntree(*command, "--out", "filtered")
    with killed_at(3):
        turntree(*command, "--out", "filtered.killed", code=130)
    with edited(folder, "door_rules"):
        assert "differs in inputs.filters.0" in turntree.error(*command, "--out", "filtered.killed")
    assert "resumes after step 2" in turntree(*command, "--out", "filtered.killed").stderr
    assert rows(folder / "filtered.killed" / "metrics.jsonl") == rows(folder / "filtered" / "metrics.jsonl")
    found = rows(folder / "filtered" / "metrics.jsonl")[1:]
    assert {why for row in found for why in row["groups_dropped"]} == {"alike"}
    assert {why for row in found for why in row["prompts_skipped"]} == {"dull"}
    for row in found:
        assert row["trained_groups"] + sum(row["groups_dropped"].values()) + row["groups_censored"] == row["groups"]
    config = json.loads((folder / "filtered" / "config.json").read_text())["config"]
    assert config["filters"][1] == {"name": "dapo", "success": 0.5, "refill_cap": 0.5}
    assert "which has no refill_cap, skip, drop" in turntree.error(
        *command, "--filter", "door_rules:CutsAlike", "--out", "none"
    )


def test_a_renderer_of_ones_own_speaks_in_every_stage_and_pivots_remember_it(turntree, folder, traces) -> None:
    """It writes what our template writes, so what is sampled is the same; it is another renderer all the same."""
    mine = ("--renderer", "door_words:Marked")
    evaluated = ("evaluate", *ROOMS, "--count", 3, "--max-turns", 3, *SHORT)
    own, ours = (turntree.json(*evaluated, *named) for named in (mine, ()))
    assert own["sampled"] == ours["sampled"]
    profiled = ("profile", "--limit", 8, "--rollouts", 8, *SHORT, "--traces", traces)
    turntree(*profiled, "--verifier", "door_rules:begins_alike", *mine, "--out", "spoken.profile.jsonl")
    turntree("select", "spoken.profile.jsonl", "--threshold", 1, "--anchor-share", 0.5, "--out", "spoken.jsonl")
    command = ("train", "pivot", "spoken.jsonl", *PIVOT, "--verifier", "door_rules:begins_alike", "--out", "spoken")
    assert "profile renderer 'door_words:Marked" in turntree.error(*command)
    turntree(*command, *mine)
    turntree("sft", "--traces", traces, *mine, "--out", "taught", "--set", "sft.epochs=1", "--set", "check.tasks=0")
    again = ("sft", "--traces", traces, "--out", "taught", "--set", "check.tasks=0")
    assert "differs in device.renderer" in turntree.error(*again)
    assert "which has no stop_ids" in turntree.error("evaluate", *ROOMS, "--renderer", "door_rules:CutsAlike")
    older = turntree.error("evaluate", *ROOMS, "--renderer", "door_words:Older")
    assert "gave Older, which does not take the arguments of parse" in older, "before every rollout is censored for it"
    message = turntree.error("evaluate", *ROOMS, "--set", "device.renderer.tool_format=xml")
    assert "'device.renderer.tool_format': 'xml' is not allowed" in message


def test_a_log_format_of_ones_own_is_audited_and_calibrates_a_gate(turntree, folder) -> None:
    played = [
        {"side": f"t{n}", "at": step, "score": float(n % 2 and one), "said": [f"say {one * n}"] * 6}
        for step in range(2) for n in range(6) for one in range(2)
    ]  # fmt: skip
    (folder / "played.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"hello": 1}, *played]))
    mine = ("played.jsonl", "--format", "door_machinery:played", "--set", "log_format.step=at")
    result = turntree.json("audit", *mine, "--out", "played.html")
    assert result["log"]["dropped"] == {"left out by the format": 1} and result["log"]["groups"] == 12
    assert result["zero_variance_rate"] == 0.5
    calibrated = turntree("gate", "calibrate", *mine, "--turns", 3, "--thresholds", "0.5", "--json", "-", code=3)
    assert json.loads(calibrated.stdout)["groups"] == 12
    assert "'log_format.stp': unknown key" in turntree.error("audit", *mine, "--set", "log_format.stp=at")


# a class with tools


def test_a_class_with_tools_is_trained_on_and_an_edit_of_it_is_noticed(turntree, folder) -> None:
    people = [{"question": f"Where does Ada live, asked {n} times?", "answer": "Oslo"} for n in range(40)]
    (folder / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people))
    command = (
        *("train", "online", "--environment", "trl:my_library:Library", "--tasks", "people.jsonl", "--model", "qa"),
        *(*TINY, "--max-tokens", 64, "--engine", "my_script:scripted", "--out", "library"),
    )
    with killed_at(2):
        turntree(*command, code=130)
    with edited(folder, "my_library"):
        assert "differs in inputs.environment" in turntree.error(*command)
    turntree(*command)
    played = [rollout for group in rows(folder / "library" / "rollouts.jsonl") for rollout in group["rollouts"]]
    assert {rollout["reward"] for rollout in played} > {1.0, 0.5}, "the tool was called by some, and by some not"
    trained = [row for row in rows(folder / "library" / "metrics.jsonl") if "ratio_max" in row]
    assert trained and all(row["ratio_max"] == 1 and row["importance_mean"] != 1 for row in trained)


# what goes wrong is said of whose it is


def test_what_is_no_engine_is_refused_by_what_it_lacks(turntree, folder) -> None:
    message = turntree.error("evaluate", *ROOMS, "--engine", "door_machinery:Half")
    assert "'door_machinery:Half' gave Half, which has no in_flight, submit, cancel, poll, policy_version" in message
    message = turntree.error("evaluate", *ROOMS, "--engine", "hf", "--set", "device.engine.max_batch_row=1")
    assert "'device.engine.max_batch_row': unknown key; did you mean 'max_batch_rows'?" in message


HALVES = """
from turntree.core.messages import Message
from turntree.core.protocols import Observation

class Half:
    tools = ()

    def __init__(self, number, fails):
        self.task_id, self.fails, self.step_now = f"half-{number}", fails, 0

    def reset(self):
        return (Message("user", "Your task is to: look around.\\n> "),)

    def step(self, action):
        self.step_now += 1
        if self.fails:
            raise TypeError("no such room")
        seldom = {"seen": 1.0} if self.step_now == 2 else {}
        over = self.step_now == 4
        told = (Message("user", "Nothing happens."),)
        return Observation(told, over, success=False if over else None, metrics=seldom)

def tasks(split, count, *, seed, fails: bool = False):
    return [Half(f"{split}-{number}", fails) for number in range(count)]
"""


def test_a_number_that_only_some_answers_tell_is_a_share_of_all_of_them(turntree, folder) -> None:
    (folder / "halves.py").write_text(HALVES)
    command = ("evaluate", "--environment", "halves:tasks", "--count", 3, "--max-turns", 4, "--max-tokens", 24)
    result = turntree.json(*command, "--set", "cut_turns=judge")
    assert result["greedy"]["seen_share"] == 0.25


def test_rollouts_that_all_fail_are_said_with_their_reason(turntree, folder) -> None:
    (folder / "halves.py").write_text(HALVES)
    halves = ("--environment", "halves:tasks", "--set", "environment.fails=true")
    said = turntree.error("evaluate", *halves, "--count", 2, "--max-turns", 2, *SHORT)
    assert "no episode has an outcome (2 x TypeError: no such room)" in said
    said = turntree.error("train", "online", *halves, *TINY, "--out", "halves")
    assert "no rollout of the run has a reward" in said and "(16 x TypeError: no such room)" in said


def test_an_error_in_a_part_of_ones_own_is_not_called_a_defect_of_turntree(turntree, folder) -> None:
    (folder / "door_mistakes.py").write_text("def wrong(tree, rewards):\n    return rewards.nothing\n")
    command = ("train", "online", *ROOMS, *TINY, "--out", "mistaken", "--estimator", "door_mistakes:wrong")
    message = turntree.error(*command)
    assert "door_mistakes.py:2: wrong raised AttributeError: 'Rewards' object has no attribute 'nothing'" in message


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (("--brancher", "door_mistakes:Bare"), "subclass turntree.core.protocols.Brancher"),
        (
            ("--gate", "door_mistakes:Nothing"),
            "gave Nothing, which has no first_look, decide",
        ),
        (("--gate", "door_mistakes:Truth"), "field 'gate': answered True; return a turntree.core.protocols"),
        (("--brancher", "door_mistakes:Greedy"), "asks for a fork into 9 branches where 1 leaves may be added"),
        (("--estimator", "door_mistakes:silent"), "field 'estimator': gave NoneType instead of a credit"),
    ],
)
def test_what_a_part_of_ones_own_may_not_do_is_said_and_trains_nothing_in_silence(turntree, folder, part, said) -> None:
    (folder / "door_mistakes.py").write_text(
        "from turntree.core.protocols import BranchDecision, Brancher, Gate\n"
        "class Nothing:\n    pass\n"
        "class Bare:\n    def decide(self, moment):\n        return None\n"
        "class Truth(Gate):\n    def decide(self, group):\n        return True\n"
        "class Greedy(Brancher):\n"
        "    def decide(self, moment):\n        return BranchDecision(branches=9, reason='', numbers={})\n"
        "def silent(tree, rewards):\n    pass\n"
    )
    sys.modules.pop("door_mistakes", None)
    message = turntree.error("train", "online", *ROOMS, *TINY, "--out", "refused", "--overwrite", *part)
    assert said in message and "did not expect" not in message
