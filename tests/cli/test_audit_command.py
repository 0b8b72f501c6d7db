"""`turntree audit`: real rollouts of someone else's agent, as a user would bring them."""

import json
import lzma
import re
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def airline(shared_data, tmp_path_factory):
    """The 200 rollouts that tau-bench publishes (50 tasks, 4 trials of gpt-4o) in the documented JSONL."""
    with lzma.open(shared_data / "tau2" / "trajectories" / "taubench1_gpt-4o-airline.json.xz", "rt") as source:
        rollouts = json.load(source)
    path = tmp_path_factory.mktemp("logs") / "airline.jsonl"
    with path.open("w") as log:
        for row in rollouts:
            said = [turn for turn in row["traj"] if turn["role"] == "assistant"]
            actions = [json.dumps(turn.get("tool_calls") or turn.get("content")) for turn in said]
            log.write(json.dumps({"group": str(row["task_id"]), "reward": row["reward"], "actions": actions}) + "\n")
    return path


@pytest.fixture(scope="module")
def page_and_figures(turntree, airline):
    out = airline.parent / "audit.html"
    return turntree.json("audit", airline, "--out", out), out


class TestRealRollouts:
    def test_the_figures_are_those_of_a_direct_count(self, page_and_figures, airline):
        figures, _ = page_and_figures
        groups = {}
        for line in airline.read_text().splitlines():
            row = json.loads(line)
            groups.setdefault(row["group"], []).append((row["reward"], len(row["actions"])))
        flat = [group for group in groups.values() if len({reward for reward, _ in group}) == 1]
        turns = sum(turns for group in groups.values() for _, turns in group)
        assert len(groups) == 50 and figures["zero_variance_rate"] == len(flat) / 50 == 0.48
        assert figures["cost"]["turns"]["total"] == turns
        assert figures["cost"]["turns"]["zero_variance"] == sum(turns for group in flat for _, turns in group)
        assert (figures["counts"]["all_fail"], figures["counts"]["all_succeed"]) == (14, 10)

    def test_what_the_log_does_not_tell_is_null_with_the_reason(self, page_and_figures):
        figures, _ = page_and_figures
        assert figures["over_time"] is None and figures["remedies"]["greso"] is None
        assert {"greso", "pivots", "over_time", "tokens", "gate"} <= set(figures["absent"])
        assert "tokens" not in figures["cost"]

    def test_the_page_begins_with_the_sentence_and_is_whole_in_itself(self, page_and_figures):
        figures, out = page_and_figures
        page = out.read_text()
        assert figures["headline"] == "48% of your groups bought no gradient; they cost 53% of the generated text."
        body = page[page.index("<body>") :]
        assert body.index(figures["headline"]) < body.index('<table class="stack"') < body.index("<h2>What would have")
        assert not re.search(r'(src|href)="(?!#)', page) and "{{" not in page and "None" not in body
        for reason in figures["absent"].values():
            assert reason.split(":")[0] in page
        assert page.count("GRESO, gate and DAPO<span") == 1

    def test_the_same_log_gives_the_same_bytes(self, turntree, page_and_figures, airline):
        _, out = page_and_figures
        again = airline.parent / "again.html"
        turntree("audit", airline, "--out", again)
        assert again.read_bytes() == out.read_bytes()


def training_log(path, iterations=6):
    """A small run with iterations, tokens, types, a task that never teaches, and a line that was cut off."""
    with path.open("w") as log:
        for iteration in range(iterations):
            for task, rewards in (("hard", [0, 0]), ("learned", [0, 1] if iteration < 3 else [1, 1]), ("odd", [0, 1])):
                for sample, reward in enumerate(rewards):
                    row = {"group": task, "task": task, "iteration": iteration, "task_type": task[0], "reward": reward}
                    actions = [f"{task} {i}" for i in range(4 + sample)]
                    log.write(json.dumps(row | {"actions": actions, "turn_tokens": [5] * len(actions)}) + "\n")
        log.write('{"group": "odd", "rew')
    return path


def test_a_training_run_gets_its_bars_over_time_and_says_what_was_dropped(turntree, tmp_path):
    done = turntree(
        "audit", training_log(tmp_path / "log.jsonl"), "--out", tmp_path / "a.html", "--json", tmp_path / "a.json"
    )
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["headline"] in done.stdout and "dropped 1: not JSON" in done.stdout
    assert figures["log"]["first_dropped"]["not JSON"].split(" (")[0].endswith("log.jsonl:37")
    assert [row["zero_variance_rate"] for row in figures["over_time"]] == [1 / 3] * 3 + [2 / 3] * 3
    assert [row["task"] for row in figures["tasks"]["rows"]] == ["hard"]
    assert set(figures["by_task_type"]) == {"h", "l", "o"}
    page = (tmp_path / "a.html").read_text()
    assert page.count('<table class="stack"') == 2 and page.count('<th scope="row">iteration ') == 6
    assert "1 dropped:" in page and "log.jsonl:37" in page


def test_the_log_of_a_run_directory_is_found_in_it(turntree, tmp_path):
    from turntree.logs.groups import LoggedGroup, LoggedRollout
    from turntree.logs.rollouts import group_to_json

    rollouts = (LoggedRollout(actions=("a", "b"), reward=1.0, turn_tokens=(1, 1)),) * 2
    group = LoggedGroup(id="g", task="t", rollouts=rollouts, iteration=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts.jsonl").write_text(json.dumps(group_to_json(group)) + "\n")
    figures = turntree.json("audit", tmp_path / "run", "--out", tmp_path / "a.html")
    assert figures["log"]["format"] == "turntree" and figures["zero_variance_rate"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: does not exist"),
        (("log.jsonl", "--format", "verl"), "holds no rollout that can be read"),
        (("log.jsonl", "--turn-separator", "("), "field 'log_format.turn_separator': is not a regular expression"),
        (("log.jsonl", "--epochs", 0), "field 'epochs': is 0"),
        (("log.jsonl", "--set", "greso.p=1"), "unknown key"),
    ],
)
def test_bad_input_ends_in_one_line(turntree, tmp_path, arguments, line):
    training_log(tmp_path / "log.jsonl", 1)
    assert line in turntree.error("audit", *arguments, cwd=tmp_path)


def test_an_audit_loads_what_it_needs_and_no_trainers_code(tmp_path):
    log = training_log(tmp_path / "log.jsonl")
    heavy = [
        "torch",
        "transformers",
        "pandas",
        "pydantic",
        "matplotlib",
        "jsonschema",
        "starlette",
        "turntree.rollout.service",
    ]
    heavy += ["turntree.stages.export", "turntree.stages.verifier", "turntree.gateway.server"]
    code = (
        f"import sys; HEAVY = {heavy}; from turntree.cli.main import main; "
        f"main(['audit', {str(log)!r}, '--out', {str(tmp_path / 'a.html')!r}, '--json', '-']); "
        "print([name for name in HEAVY if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:] + done.stderr


def test_json_on_the_standard_output_writes_no_page_and_a_log_without_iterations_says_so(turntree, tmp_path):
    rows = [{"group": "g", "reward": reward, "epoch": epoch} for epoch in (1, 2) for reward in (0.0, 0.3)]
    for name, told in (("with", rows), ("without", [{k: v for k, v in row.items() if k != "epoch"} for row in rows])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        found = turntree("audit", f"{name}.jsonl", "--json", "-", cwd=tmp_path)
        assert json.loads(found.stdout)["counts"]["groups"] == (2 if name == "with" else 1)
        assert ("compared as one group" in found.stderr) is (name == "without")
        assert "at least 0.5" in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with.jsonl", "without.jsonl"]
