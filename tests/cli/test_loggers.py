"""`--log`: what loggers are told is what `metrics.jsonl` holds, once, and no run depends on them."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.run.folder import open_run
from turntree.run.loggers import check, flat, following
from turntree.train.checkpoints import Checkpoints

PIVOT = (
    "--steps",
    2,
    "--max-tokens",
    24,
    "--set",
    "train.groups=2",
    "--set",
    "train.group_size=2",
    "--set",
    "check.tasks=0",
)
MODULE = '''
import json

class Lines:
    """Appends what it is told to `told.jsonl` of the run directory."""

    def __init__(self, run, *, name: str = "told.jsonl"):
        print("this is no result")
        self.path = run.folder / name
        self.write(begun=run.stage, model=run.config["model"], run=run.name, resumed=run.resumed)

    def log(self, metrics, step):
        print("this is no result")
        self.write(step=step, metrics=dict(metrics))

    def close(self):
        self.write(closed=True)

    def write(self, **row):
        with self.path.open("a") as handle:
            handle.write(json.dumps(row) + "\\n")

class Failing(Lines):
    def log(self, metrics, step):
        super().log(metrics, step)
        metrics.clear()
        raise ConnectionError("no route\\nto the server")

class Exiting(Failing):
    def log(self, metrics, step):
        raise SystemExit("no route to the server")

class Asynchronous(Lines):
    async def log(self, metrics, step): ...

class Unbuilt:
    def __init__(self, run):
        raise ConnectionError("no route")

class NoClose:
    def log(self, metrics, step): ...
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logger_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("logger_module", None)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(run: Path) -> list[tuple[int, dict[str, float]]]:
    """What `metrics.jsonl` holds, in a logger's words."""
    return [(row["step"], flat(row)) for row in lines(run / "metrics.jsonl")]


def told(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row["step"], row["metrics"]) for row in lines(run / "told.jsonl") if "step" in row]


def test_a_logger_of_ones_own_is_told_every_row_and_the_configuration_once(turntree, household, folder) -> None:
    result = turntree.json(
        *("train", "pivot", household / "pivots.jsonl", "--out", "run", *PIVOT, "--log", "logger_module:Lines")
    )
    run = folder / "run"
    assert result["steps"] == 2 and [step for step, _ in told(run)] == [1, 2]
    assert told(run) == logged(run)
    first, *_, last = lines(run / "told.jsonl")
    assert first == {"begun": "train pivot", "model": "default", "run": "run", "resumed": False}
    assert last == {"closed": True}
    assert json.loads((run / "config.json").read_text())["config"]["loggers"] == [{"name": "logger_module:Lines"}]


def test_fine_tuning_and_online_training_log_too(turntree, household, folder) -> None:
    log = ("--log", "logger_module:Lines")
    turntree(
        "sft", "--traces", household / "traces.jsonl", "--epochs", 1, "--out", "sft", *log, "--set", "check.tasks=0"
    )
    online = ("--iterations", 1, "--groups", 2, "--group-size", 2, "--max-turns", 2, "--max-tokens", 12, "--count", 2)
    turntree("train", "online", "--out", "online", *online, *log, "--set", "check.tasks=1")
    for run in (folder / "sft", folder / "online"):
        assert told(run) == logged(run) and told(run)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_run_that_goes_on_tells_nothing_twice_and_a_new_logger_everything(
    turntree, household, folder, monkeypatch
) -> None:
    command = ("train", "pivot", household / "pivots.jsonl", "--out", "run", *PIVOT, "--log", "logger_module:Lines")
    command += ("--set", "train.check_every=1")  # so that the checkpoint of the last step comes after its row
    every = ("--set", "checkpoints.every=1")
    save = Checkpoints.save
    with monkeypatch.context() as patch:  # dies when step 2 is logged, and saved is step 1
        patch.setattr(
            Checkpoints, "save", lambda self, step, *more: (interrupt if step == 2 else save)(self, step, *more)
        )
        turntree(*command, *every, code=130)
    before = told(folder / "run")
    assert [step for step, _ in before] == [1, 2]
    (folder / "other_module.py").write_text(MODULE.replace("told.jsonl", "other.jsonl"))
    sys.modules.pop("other_module", None)
    turntree(*command, "--log", "other_module:Lines", "--set", "checkpoints.every=1")
    run = folder / "run"
    assert told(run) == before, "step 2 is logged again in metrics.jsonl only"
    assert [row["resumed"] for row in lines(run / "told.jsonl") if "begun" in row] == [False, True]
    assert [(row["step"], row["metrics"]) for row in lines(run / "other.jsonl") if "step" in row] == logged(run)


def test_a_run_that_is_begun_anew_is_told_anew(turntree, household, folder) -> None:
    command = ("train", "pivot", household / "pivots.jsonl", "--out", "run", *PIVOT, "--log", "logger_module:Lines")
    turntree(*command)
    turntree(*command, "--overwrite")
    assert [step for step, _ in told(folder / "run")] == [1, 2, 1, 2]
    assert [row["resumed"] for row in lines(folder / "run" / "told.jsonl") if "begun" in row] == [False, False]


@pytest.mark.parametrize("name", ["Failing", "Unbuilt", "Exiting"])
def test_a_logger_that_raises_is_reported_once_and_training_goes_on(turntree, household, folder, name) -> None:
    done = turntree(
        *("train", "pivot", household / "pivots.jsonl", "--out", "run", *PIVOT),
        *("--log", f"logger_module:{name}", "--log", "logger_module:Lines"),
    )
    said = [line for line in done.stderr.splitlines() if "is switched off" in line]
    assert (
        len(said) == 1 and f"'logger_module:{name}'" in said[0] and "it raised" in said[0] and ": no route" in said[0]
    )
    assert len(lines(folder / "run" / "metrics.jsonl")) == 2
    found = told(folder / "run")
    assert [step for step, _ in found].count(2) == 1
    assert all(row in logged(folder / "run") for row in found), "what one takes out, others have"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("tensorbord", "registered: tensorboard, trackio, wandb"),
        ("logger_module:Nothing", "has no 'Nothing'"),
        ("logger_module:NoClose", "which has no log and close"),
        ("logger_module:Asynchronous", "its log or close is asynchronous or a generator"),
    ],
)
def test_what_is_no_logger_is_refused(turntree, household, folder, named, said) -> None:
    command = ("train", "pivot", household / "pivots.jsonl", "--out", "run", *PIVOT)
    assert said in turntree.error(*command, "--log", named)


def test_a_logger_that_is_named_twice_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(InputError, match="'wandb' is named twice"):
        check([Part("wandb"), Part("wandb")])


def test_only_numbers_are_told_by_flat_names() -> None:
    row = {"step": 3, "a": 1, "b": {"c": 0.5, "": 2.0, "d": {"step": 4}}, "on": True, "no": None, "l": [1], "s": "x"}
    assert flat(row) == {"a": 1, "b/c": 0.5, "b/_": 2.0, "b/d/step": 4, "on": 1.0}


# the real packages (what they warn of is theirs)

ROWS = [{"step": 0, "held_out": 0.25}, {"step": 1, "reward": 0.5, "of kind": {"go to": 3}, "timing": {"seconds": 1.5}}]


def run_twice(out: Path, part: Part, pause: float = 0.0) -> None:
    """Two rows, with a kill after the first."""
    for rows in ((ROWS[0],), (ROWS[0], ROWS[1])):
        with open_run(out, "sft", {"model": "tiny", "loggers": [part.name]}, {}) as run:
            run.rewind(None)
            with following(run, [part]):
                for row in rows:
                    run.log(row)
        time.sleep(pause)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_back_what_was_logged(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run_twice(tmp_path / "run", Part("tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {
        tag: [(e.step, make_ndarray(e.tensor_proto).item()) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert b'"model": "tiny"' in found.pop("config")[0][1]
    assert found == {
        "held_out": [(0, 0.25)],
        "reward": [(1, 0.5)],
        "of kind/go to": [(1, 3.0)],
        "timing/seconds": [(1, 1.5)],
    }


@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_what_was_logged(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio import utils

    if str(utils.TRACKIO_DIR) != str(tmp_path / "trackio"):
        pytest.skip("trackio was imported before its folder was set")
    run_twice(tmp_path / "run", Part("trackio"))
    (place,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(place) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, json.loads(text)) for _, step, text in rows] == [(row["step"], flat(row)) for row in ROWS]


def wandb_records(log: bytes) -> list[bytes]:
    """The records of a LevelDB log behind a header of 7 bytes: blocks of 32 KiB, in them fragments behind their
    checksum (4 bytes), length (2) and type (1 whole, 2 first, 3 middle, 4 last)."""
    found, begun, place = [], b"", 7
    while place + 7 <= len(log):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        begun = (b"" if kind in (1, 2) else begun) + log[place + 7 : place + 7 + size]
        found += [begun] if kind in (1, 4) else []
        place += 7 + size
    return found


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_what_was_logged_offline(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_twice(tmp_path / "run", Part("wandb"), pause=1.1)  # its folders are named by the second
    history: dict[str, Any] = {}
    for place in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(place.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                history[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    wanted = {name: value for row in ROWS for name, value in flat(row).items()}
    assert {name: value for name, value in history.items() if not name.startswith("_")} == wanted
