"""Kill drills: `turntree profile` killed at random points and started again ends with the artifact of a calm run."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Loading torch costs seconds, so one process loads it and forks a child for every run that is to be killed.
DRIVER = """
import os, random, signal, sys, time
import torch, transformers
from turntree.cli.main import main
from turntree.stages import profile
arguments, seed, kills = sys.argv[3:], int(sys.argv[1]), int(sys.argv[2])
*options, calm, killed = arguments

def start(out):
    child = os.fork()
    if child == 0:
        main([*options, "--out", out])
        os._exit(0)
    return child

began = time.perf_counter()
assert os.waitpid(start(calm), 0)[1] == 0
duration = time.perf_counter() - began
points = random.Random(seed)
waves = killed + ".waves"

def lines():
    return sum(1 for _ in open(waves, "rb")) if os.path.exists(waves) else 0

for number in range(kills):
    child = start(killed)
    if number + 1 < kills:
        time.sleep(points.uniform(0.1, 0.7) * duration)
    while number + 1 == kills and lines() < 2:  # the last one comes after a finished wave, however busy the machine is
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("lines:", lines())
assert os.waitpid(start(killed), 0)[1] == 0
"""


def artifact(path: Path) -> list:
    header, *rows = path.read_text().splitlines()
    return [{key: value for key, value in json.loads(header).items() if key != "timing"}, *rows]


def test_a_profile_killed_at_random_points_is_the_profile_of_a_calm_run(household, tmp_path):
    command = ("profile", "--traces", household / "traces.jsonl", "--limit", 15, "--rollouts", 8, "--adaptive")
    calm, killed, waves = tmp_path / "calm.jsonl", tmp_path / "killed.jsonl", ("--set", "profile.wave=3")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "0", "3", *map(str, (*command, "--max-tokens", 24)), *waves, calm, killed],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("lines: ")]
    assert len(lines) == 3 and max(lines) > 1, "some kill came after a finished wave"
    assert artifact(calm) == artifact(killed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm.jsonl", "killed.jsonl"]


def interrupted(turntree, household, out, monkeypatch, *extra):
    """A run that stops in its second wave, as a kill would."""
    from turntree.stages import profile as stage

    whole, done = stage.profile_wave, []

    def failing(*arguments):
        done.append(arguments)
        if len(done) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(stage, "profile_wave", failing)
        return turntree(*command(household, out), *extra, code=130)


def command(household, out):
    shape = ("--limit", 12, "--rollouts", 4, "--max-tokens", 24, "--set", "profile.wave=5")
    return ("profile", "--traces", household / "traces.jsonl", *shape, "--out", out)


def test_an_interruption_says_what_is_kept_and_the_next_run_what_is_there(turntree, household, tmp_path, monkeypatch):
    stopped = interrupted(turntree, household, tmp_path / "p.jsonl", monkeypatch)
    assert "5 of 12 candidates are kept; run the same command again to resume" in stopped.stderr
    assert not (tmp_path / "p.jsonl").exists()
    assert "5 of 12 candidates are done" in turntree(*command(household, tmp_path / "p.jsonl")).stderr
    turntree(*command(household, tmp_path / "calm.jsonl"))
    assert artifact(tmp_path / "p.jsonl") == artifact(tmp_path / "calm.jsonl")


def test_another_run_does_not_go_on_with_it(turntree, household, tmp_path, monkeypatch):
    out = tmp_path / "p.jsonl"
    interrupted(turntree, household, out, monkeypatch)
    assert "profile.seed (0, not 3)" in turntree.error(*command(household, out), "--seed", 3)
    assert "verifier" in turntree.error(*command(household, out), "--verifier", "strict")
    traces = tmp_path / "other.jsonl"
    *lines, one, other = (household / "traces.jsonl").read_text().splitlines(keepends=True)
    traces.write_text("".join([*lines, other, one]))
    assert "traces_hash" in turntree.error(*command(household, out), "--traces", traces)
    assert "5 of 12" not in turntree(*command(household, out), "--seed", 3, "--overwrite").stderr


def test_a_finished_profile_of_other_settings_is_replaced_only_if_asked(turntree, household, tmp_path):
    out = tmp_path / "p.jsonl"
    turntree(*command(household, out))
    turntree(*command(household, out))  # the same again: made anew, as ever
    before = out.read_bytes()
    message = turntree.error(*command(household, out), "--seed", 3)
    assert "profile.seed (0, not 3)" in message and "--overwrite" in message
    turntree("rescore", out, "--verifier", "strict", "--out", tmp_path / "rescored.jsonl")
    rescoring = ("rescore", out, "--verifier", "recommended", "--out", tmp_path / "rescored.jsonl")
    assert "verifier" in turntree.error(*rescoring)
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert "--overwrite" in turntree.error(*command(household, tmp_path / "notes.jsonl"))
    assert out.read_bytes() == before
    turntree(*command(household, out), "--seed", 3, "--overwrite")
    assert json.loads(out.read_text().splitlines()[0])["config"]["profile"]["seed"] == 3


def test_a_quickstart_that_starts_over_drops_the_profile_of_the_other_settings(tmp_path, monkeypatch):
    from turntree.experiments import quickstart

    monkeypatch.setattr(quickstart, "_run", lambda config, out: {"left": sorted(path.name for path in out.iterdir())})
    for name in ("profile.jsonl", "profile.jsonl.waves"):
        (tmp_path / name).touch()
    kept = quickstart.run_quickstart(quickstart.QuickstartConfig(), tmp_path)["left"]
    assert kept == ["config.json", "profile.jsonl", "profile.jsonl.waves"]
    left = quickstart.run_quickstart(quickstart.QuickstartConfig(seed=3), tmp_path, overwrite=True)["left"]
    assert left == ["config.json"]
