"""The same parts from an installed wheel, each by the name of its entry point: train, die, go on, evaluate, report.
No file of turntree is edited, and none of the modules is in the current folder."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from doors.parts_of_ones_own import MODULES
from doors.test_module_object import SHORT, TINY, rows

POINTS = {
    "environments": {"doors_rooms": "door_rooms:tasks"},
    "gates": {"doors_alike": "door_rules:CutsAlike"},
    "branchers": {"doors_other": "door_rules:EveryOther"},
    "estimators": {"doors_centred": "door_rules:centred"},
    "filters": {"doors_bored": "door_rules:Bored"},
    "rewards": {"doors_brief": "door_rules:brief"},
    "verifiers": {"doors_begins": "door_rules:begins_alike"},
    "engines": {"doors_counting": "door_machinery:Counting"},
    "renderers": {"doors_marked": "door_words:Marked"},
    "loggers": {"doors_lines": "door_machinery:Lines"},
    "log_formats": {"doors_played": "door_machinery:played"},
    "trace_formats": {"doors_talk": "door_machinery:read"},
    "demonstrators": {"doors_shown": "my_demonstrations:Rooms"},
}
ROOMS = ("--environment", "doors_rooms", "--turns", 3)
ONLINE = (
    *("train", "online", *ROOMS, *TINY, "--engine", "doors_counting", "--renderer", "doors_marked"),
    *("--gate", "doors_alike", "--set", "gate.turn=3", "--brancher", "doors_other", "--initial", 2),
    *("--estimator", "doors_centred", "--filter", "doors_bored", "--reward", "doors_brief=0.5"),
    *("--reward", "environment", "--log", "doors_lines"),
)


def wheel(folder: Path) -> Path:
    """A wheel written by hand, as a build backend writes it: modules, metadata, entry points, a record of them all."""
    lines: list[str] = []
    for kind, named in POINTS.items():
        lines += [f"[turntree.{kind}]", *(f"{name} = {target}" for name, target in named.items())]
    info = "doors_of_mine-1.5.dist-info"
    files = {f"{name}.py": text for name, text in MODULES.items()} | {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: doors-of-mine\nVersion: 1.5\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(lines),
    }
    record = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in files.items()]
    path = folder / "doors_of_mine-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,", ""])}.items():
            archive.writestr(name, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the wheel, without any index."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, str(wheel(tmp_path_factory.mktemp("dist")))], check=True, timeout=120)
    return site


@pytest.fixture(scope="module")
def place(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty current folder, with what is installed on the path."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("elsewhere")
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(installed), *sys.path])
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield folder
        for name in set(sys.modules) - before:
            if name in MODULES:
                del sys.modules[name]


@pytest.fixture(scope="module")
def whole(turntree, place: Path) -> Path:
    turntree(*ONLINE, "--out", "whole")
    return place / "whole"


def test_a_run_by_names_that_is_killed_goes_on_to_the_same_artifacts(turntree, installed, place, whole) -> None:
    """SIGKILL out of the logger, in a process of its own: nothing can be tidied up."""
    script = "import sys; from turntree.cli.main import main; main(sys.argv[1:])"
    paths = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    died = subprocess.run(
        [sys.executable, "-c", script, *map(str, ONLINE), "--out", "killed"],
        env={**os.environ, "PYTHONPATH": paths, "DIE_AT": "2"},
        timeout=300,
        capture_output=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert "resumes after step" in turntree(*ONLINE, "--out", "killed").stderr
    weights = "model/model.safetensors"
    assert (place / "killed" / weights).read_bytes() == (whole / weights).read_bytes()
    for name in ("metrics.jsonl", "rollouts.jsonl", "trees.jsonl", "held_out.jsonl", "gate.jsonl"):
        assert rows(place / "killed" / name) == rows(whole / name), name


def test_the_run_says_which_distribution_its_parts_are_of(whole: Path) -> None:
    inputs = json.loads((whole / "config.json").read_text())["inputs"]
    ours = {name for name, value in inputs.items() if "@doors-of-mine 1.5" in value}
    assert {"environment", "gate", "brancher", "estimator", "filters.0", "device.engine", "device.renderer"} <= ours


def test_it_is_evaluated_and_reported_by_names(turntree, place: Path, whole: Path) -> None:
    played = ("evaluate", *ROOMS, "--model", "whole/model", "--count", 2, "--max-turns", 3, *SHORT)
    assert turntree.json(*played, "--engine", "doors_counting")["greedy"]["short_share"] is not None
    turntree("report", "whole")
    assert "room-" in (whole / "trees.html").read_text()


def test_traces_verifiers_and_logs_by_names(turntree, place: Path) -> None:
    turntree("traces", "doors_shown", "--count", 3, "--out", "shown.jsonl")
    said = {"name": "one", "talk": [["world", "Your task is to: look around.\n> "], ["agent", "look"]]}
    (place / "talks.jsonl").write_text(json.dumps(said) + "\n")
    read = turntree.json("traces", "import", "talks.jsonl", "--format", "doors_talk", "--dev", 0, "--out", "t.jsonl")
    assert read["traces_kept"] == 1
    profiled = ("profile", "--traces", "shown.jsonl", "--rollouts", 4, *SHORT, "--verifier", "doors_begins")
    assert turntree.json(*profiled, "--out", "profile.jsonl")["candidates"] == 3
    played = [{"side": f"t{n % 4}", "step": 0, "score": float(n < 4), "said": ["look"]} for n in range(8)]
    (place / "played.jsonl").write_text("".join(json.dumps(row) + "\n" for row in played))
    assert turntree.json("audit", "played.jsonl", "--format", "doors_played", "--out", "a.html")["log"]["groups"] == 4
