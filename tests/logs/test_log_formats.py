"""Logs of five frameworks come out as the same groups; what cannot be read is counted."""

import datetime
import json
import lzma
import math
import os
from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.logs.read import open_log


def write(path: Path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path, form="auto", **options):
    log = open_log([path], Part(form, options))
    return list(log), log.report


def verl_dump(folder, step, groups, **extra):
    """One file of `RayPPOTrainer._write_generations`: `groups` maps a prompt to (output, score) pairs."""
    rows = [
        {"input": prompt, "output": output, "gts": None, "score": score, "step": step, **extra}
        for prompt, rollouts in groups.items()
        for output, score in rollouts
    ]
    return write(folder / f"{step}.jsonl", rows)


class TestVerl:
    def test_rollouts_of_one_prompt_in_one_step_are_a_group_and_the_prompt_is_the_task(self, tmp_path):
        verl_dump(tmp_path, 2, {"p": [("a", 1.0), ("b", 0.0)], "q": [("c", 0.0), ("d", 0.0)]})
        verl_dump(tmp_path, 10, {"p": [("a", 1.0), ("a", 1.0)]})
        groups, report = read(tmp_path)
        assert [(g.iteration, g.rewards) for g in groups] == [(2, (1.0, 0.0)), (2, (0.0, 0.0)), (10, (1.0, 1.0))]
        assert groups[0].task == groups[2].task != groups[1].task
        assert report.to_json() | {"format": "verl", "files": 2, "rollouts": 6, "dropped": {}} == report.to_json()

    def test_the_uid_of_trainer_v1_tells_two_groups_with_one_prompt_apart(self, tmp_path):
        rows = [
            {"input": "p", "output": "o", "score": float(i), "step": 1, "uid": f"{uid}_{i}_0"}
            for uid in ("u_1", "u_2")
            for i in range(2)
        ]
        groups, _ = read(write(tmp_path / "1.jsonl", rows))
        assert [g.rewards for g in groups] == [(0.0, 1.0), (0.0, 1.0)] and len({g.task for g in groups}) == 1

    def test_turns_are_unknown_until_the_user_says_what_separates_them(self, tmp_path):
        text = "look\nuser\n<tool_response>\ndark\n</tool_response>\nassistant\ngo north"
        path = verl_dump(tmp_path, 1, {"p": [(text, 1.0), ("look", 0.0)]})
        (group,), _ = read(path)
        assert group.rollouts[0].turns is None and group.rollouts[0].characters == len(text)
        (group,), _ = read(path, turn_separator=r"\nuser\n.*?\nassistant\n")
        assert group.rollouts[0].actions == ("look", "go north") and group.rollouts[1].actions == ("look",)
        assert group.rollouts[0].observations == ("", text[4:-8])
        assert group.rollouts[0].characters == len("look") + len("go north")  # what was generated, not what was read

    def test_a_score_that_is_nan_is_censored_and_another_column_can_be_the_reward(self, tmp_path):
        path = verl_dump(tmp_path, 1, {"p": [("a", math.nan), ("b", 1.0)]}, acc=0.5)
        assert read(path)[0][0].rewards == (None, 1.0)
        assert read(path, rewards=("acc", "score"))[0][0].rewards == (0.5, 1.5)

    def test_rollouts_without_a_prompt_or_a_uid_are_counted_and_never_one_group(self, tmp_path):
        row = {"input": " ", "output": "o", "score": 1.0, "step": 1}
        groups, report = read(write(tmp_path / "1.jsonl", [row, row, row | {"uid": "u_0_0"}]))
        assert len(groups) == 1
        assert report.dropped == {"neither a prompt nor a uid: its group is not known": 2}


def trl_table(folder, step, rows, columns=("reward_a",)):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["prompt", "completion", *columns, "advantage"]
    table = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    parquet.write_table(pyarrow.table({"step": [step] * len(rows), **table}), path)
    return path


def as_table(path, rows):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


ROWS = {
    "generic": [{"group": f"g{n // 2}", "iteration": 1, "reward": n / 4, "actions": ["a"]} for n in range(4)],
    "verl": [{"input": f"q{n // 2}", "output": "o", "gts": "x", "score": float(n % 2), "step": 1} for n in range(4)],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("where", ["rows.parquet", "data/train-00000-of-00001.parquet"])
def test_a_table_is_the_log_that_its_rows_would_be_as_json_lines(name, where, tmp_path):
    """A file, or a data set of the Hub as a folder; what JSON has not (a time) is text."""
    rows = [row | {"when": datetime.datetime(2026, 1, 1)} for row in ROWS[name]]
    as_table(tmp_path / "table" / where, rows)
    told = [row | {"when": str(row["when"])} for row in rows]
    path = write(tmp_path / "lines" / "rows.jsonl", told)
    groups, report = read(tmp_path / "table")
    same, as_lines = read(path)
    assert groups == same and groups and report.format == as_lines.format == name


class TestTrl:
    def test_reward_functions_are_summed_and_the_advantages_confirm_it(self, tmp_path):
        rows = [
            ("p", "x", 1.0, 0.0, 0.7),
            ("p", "y", 0.0, 0.5, -0.7),
            ("q", "z", 1.0, 0.0, 0.0),
            ("q", "w", 0.0, 1.0, 0.0),
        ]
        trl_table(tmp_path / "completions", 5, rows, ("accuracy_reward", "format_reward"))
        groups, report = read(tmp_path)
        assert [(g.iteration, g.rewards) for g in groups] == [(5, (1.0, 0.5)), (5, (1.0, 1.0))]
        assert report.notes and "accuracy_reward, format_reward" in next(iter(report.notes))

    @pytest.mark.parametrize("columns", [("a_reward", "b_reward"), ("a_reward", "length")])
    def test_columns_that_do_not_explain_the_advantages_are_refused(self, tmp_path, columns):
        """Weights of 1 and 0: only who names the columns may have weighted them."""
        path = trl_table(tmp_path, 1, [("p", "x", 1.0, 3.0, 0.0), ("p", "y", 2.0, 4.0, 0.0)], columns)
        for options in ({}, {"rewards": columns[:1]}):
            with pytest.raises(
                InputError, match=r"2 rows .* not those of a group whose reward is the sum of.*--reward"
            ):
                read(path, **options)

    def test_a_column_that_is_not_named_as_a_reward_is_none(self, tmp_path):
        """Adding `difficulty` would turn the group that failed into one that succeeded."""
        rows = [("p", "x", 1.0, 2, 0.7), ("p", "y", 0.0, 2, -0.7), ("q", "z", 0.0, 1, 0.0), ("q", "w", 0.0, 1, 0.0)]
        named = trl_table(tmp_path / "named", 1, rows, ("accuracy_reward", "difficulty"))
        groups, report = read(named)
        assert [g.rewards for g in groups] == [(1.0, 0.0), (0.0, 0.0)]
        assert list(report.notes) == [
            "the reward is the sum of accuracy_reward; difficulty left out; --reward says otherwise"
        ]
        unnamed = trl_table(tmp_path / "unnamed", 1, rows, ("accuracy", "difficulty"))
        with pytest.raises(InputError, match=r"which of accuracy, difficulty were rewards; .*--reward"):
            read(unnamed)
        assert [g.rewards for g in read(unnamed, rewards=("accuracy",))[0]] == [(1.0, 0.0), (0.0, 0.0)]

    def test_weights_that_are_not_1_are_refused_unless_the_columns_are_named(self, tmp_path):
        weighted = [("p", "x", 1.0, 0.0, 1.0), ("p", "y", 0.0, 1.0, 4.0), ("p", "z", 0.0, 0.0, -5.0)]
        path = trl_table(tmp_path, 1, weighted, ("a_reward", "b_reward"))
        with pytest.raises(InputError, match="the sum of a_reward, b_reward"):
            read(path)
        assert read(path, rewards=("a_reward", "b_reward"))[0][0].rewards == (1.0, 1.0, 0.0)

    def test_columns_without_names_or_advantages_are_asked_for(self, tmp_path):
        table = {"columns": ["step", "prompt", "completion", "a", "b"], "data": [[1, "p", "x", 1.0, 0.0]] * 2}
        (tmp_path / "completions_1_a.table.json").write_text(json.dumps(table))
        with pytest.raises(InputError, match=r"does not tell which of a, b were rewards.*--reward"):
            read(tmp_path)

    @pytest.mark.parametrize("groups", [((1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)), ((0, 0), (1, 1))])
    def test_groups_of_tasks_that_share_a_prompt_are_not_merged(self, tmp_path, groups):
        """Merged, they would be one mixed group, and the share without variance 0."""
        columns = ["step", "prompt", "completion", "reward", "advantage"]
        path = tmp_path / "completions_1_a.table.json"
        for shared in (False, True):
            data = [
                [1, "Play." if shared else f"Play {number}.", f"{number}", float(value), advantage]
                for number, group in enumerate(groups)
                for value in group
                for advantage in [(value - sum(group) / len(group)) * 2]
            ]
            path.write_text(json.dumps({"columns": columns, "data": data}))
            if shared:
                with pytest.raises(InputError, match="tasks share a prompt"):
                    read(path)
            else:
                assert [list(group.rewards) for group in read(path)[0]] == [list(map(float, group)) for group in groups]

    def test_a_batch_that_is_logged_again_is_dropped_and_counted(self, tmp_path):
        rows = [("p", "x", 1.0, 1.0), ("p", "y", 0.0, -1.0)]
        for step in (1, 2, 3):
            trl_table(tmp_path, step, rows if step < 3 else rows[::-1])
        groups, report = read(tmp_path)
        assert [g.iteration for g in groups] == [1, 3]
        assert report.dropped == {"the generation batch of the step before, logged again": 2}

    def test_a_reward_function_that_does_not_apply_is_left_out_and_none_at_all_is_censored(self, tmp_path):
        rows = [("p", "x", None, 1.0, 0.7), ("p", "y", None, 0.0, -0.7), ("p", "z", None, None, 0.0)]
        assert read(trl_table(tmp_path, 1, rows, ("a_reward", "b_reward")))[0][0].rewards == (1.0, 0.0, None)

    def test_the_tables_of_wandb_have_the_same_columns(self, tmp_path):
        table = {"columns": ["step", "prompt", "completion", "r", "advantage"], "data": [[1, "p", "x", 1.0, 0.0]] * 2}
        (tmp_path / "completions_1_a.table.json").write_text(json.dumps(table))
        assert read(tmp_path)[0][0].rewards == (1.0, 1.0)


class TestNemoGym:
    def test_real_rollouts_of_one_task_are_one_group(self, shared_data):
        path = shared_data / "nemo_gym" / "responses_api_agents__anyswe_agent__data__example_rollouts_hermes.jsonl.xz"
        (group,), report = read(path)
        assert report.format == "nemo-gym" and group.rewards == (0.0, 1.0, 0.0, 0.0, 1.0)
        assert group.rollouts[0].actions[0].startswith("terminal({")
        assert {rollout.generated_tokens for rollout in group.rollouts} == {None}  # its usage is all zeros

    def test_every_turn_is_a_run_of_model_items(self, shared_data):
        name = "responses_api_agents__mini_swe_agent_2__data__example_rollouts.jsonl.xz"
        groups, _ = read(shared_data / "nemo_gym" / name)
        with lzma.open(shared_data / "nemo_gym" / name, "rt") as lines:
            items = [json.loads(line)["response"]["output"] for line in lines]
        for group, output in zip(groups, items, strict=True):
            answered = ["function_call_output" in item["type"] for item in output]
            starts = sum(a and not b for a, b in zip([True, *answered], [*answered, True], strict=True))
            assert group.rollouts[0].turns == starts
        assert "\n" in groups[0].rollouts[0].actions[0]  # two calls in one turn

    @pytest.mark.parametrize("mark", [{"mask_sample": True}, {"instance_config": {"mask_sample": True}}])
    def test_a_masked_rollout_is_censored_whatever_its_reward(self, tmp_path, mark):
        row = {"response": {"output": []}, "reward": 1.0, "_ng_task_index": 3}
        (group,), _ = read(write(tmp_path / "r.jsonl", [row | mark, row]))
        assert group.rewards == (None, 1.0) and group.rollouts[0].stop == "masked"

    @pytest.mark.parametrize("prompt", [[], "", None, [{"role": "user", "content": " "}]])
    def test_rollouts_that_nothing_groups_are_counted_and_never_one_group(self, tmp_path, prompt):
        row = {"response": {"output": []}, "reward": 1.0, "responses_create_params": {"input": prompt}}
        path = write(tmp_path / "r.jsonl", [row, row, row | {"instance_id": "a"}, row | {"_ng_task_index": 0}])
        groups, report = read(path)
        assert [(g.task, len(g.rollouts)) for g in groups] == [("a", 1), ("task 0", 1)]
        assert report.dropped == {"no task index, instance or prompt: its group is not known": 2}

    def test_items_and_words_inside_lists_are_read_too(self, tmp_path):
        said = {
            "type": "message",
            "role": "assistant",
            "content": [{"content": [{"type": "output_text", "text": "yes"}]}],
        }
        row = {"reward": 1.0, "_ng_task_index": 0, "response": {"output": [[said], [said]]}}
        (group,), _ = read(write(tmp_path / "r.jsonl", [row]))
        assert group.rollouts[0].characters == len("yes\nyes")
        odd = row | {"response": {"output": ["yes"]}}
        _, report = read(write(tmp_path / "odd.jsonl", [row, odd]))
        assert report.dropped == {"an item of the prompt or the output is not an object": 1}

    def test_files_are_iterations_in_natural_order(self, tmp_path):
        for number, reward in ((9, 0.0), (10, 1.0)):
            row = {"response": {"output": []}, "reward": reward, "_ng_task_index": 0}
            write(tmp_path / f"step_{number}.jsonl", [row, row])
        assert [(g.iteration, g.rewards[0]) for g in read(tmp_path)[0]] == [(0, 0.0), (1, 1.0)]


class TestGeneric:
    def test_everything_that_the_documentation_names_is_read(self, tmp_path):
        row = {
            "group": "g",
            "task": "t",
            "iteration": 4,
            "task_type": "pick",
            "reward": 1,
            "actions": ["look", "go"],
            "turn_tokens": [3, 4],
            "observations": ["task", "room"],
            "completed": False,
            "stop": "max_turns",
        }
        (group,), _ = read(write(tmp_path / "log.jsonl", [row]))
        (rollout,) = group.rollouts
        assert (group.id, group.task, group.iteration, group.task_type) == ("4/g", "t", 4, "pick")
        assert (rollout.actions, rollout.generated_tokens, rollout.completed) == (("look", "go"), 7, False)
        assert (rollout.observations, rollout.stop, rollout.reward) == (("task", "room"), "max_turns", 1.0)

    def test_scattered_rollouts_find_their_group_and_a_name_may_come_back_in_a_later_iteration(self, tmp_path):
        rows = [
            {"group": g, "iteration": i, "reward": r}
            for i, g, r in [(1, "a", 0), (0, "b", 1), (1, "a", 1), (0, "a", 0)]
        ]
        groups, _ = read(write(tmp_path / "log.jsonl", rows))
        assert [(g.id, g.rewards) for g in groups] == [("0/b", (1.0,)), ("0/a", (0.0,)), ("1/a", (0.0, 1.0))]
        assert [g.task for g in groups] == ["b", "a", "a"]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"group": "a", "reward": 1', "not JSON"),
            ("[1]", "not a JSON object"),
            ({"group": "a"}, "no field 'reward'"),
            ({"reward": 1.0, "group": None}, "no text in field 'group'"),
            ({"group": "a", "reward": "high"}, "field 'reward' is not a number"),
            ({"group": "a", "reward": 1, "actions": "go"}, "field 'actions' is not a list of texts"),
            ({"group": "a", "reward": 1, "actions": ["go"], "turn_tokens": [1, 2]}, "lists of different lengths"),
            (
                {"group": "a", "reward": 1, "actions": ["go"], "turn_tokens": [-1]},
                "field 'turn_tokens' is not a list of whole numbers",
            ),
        ],
    )
    def test_a_line_that_cannot_be_read_is_counted_by_its_reason(self, tmp_path, line, reason):
        path = write(tmp_path / "log.jsonl", [{"group": "a", "reward": None}, line])
        (group,), report = read(path)
        assert group.rewards == (None,)
        assert report.dropped == {reason: 1} and report.first[reason].split(" (")[0] == f"{path}:2"
        assert report.lines == 2 and report.rollouts == 1


class TestRecognition:
    def test_unclear_and_unknown_lines_end_in_one_line_that_says_what_to_do(self, tmp_path):
        both = {"group": "g", "reward": 0.0, "response": {}}
        with pytest.raises(InputError, match=r":1: could be generic or nemo-gym .*give --format"):
            read(write(tmp_path / "a.jsonl", [both]))
        with pytest.raises(InputError, match=r":1: is not a known rollout log \(its fields: x\)"):
            read(write(tmp_path / "b.jsonl", [{"x": 1}]))
        with pytest.raises(InputError, match="is not a JSON object"):
            read(write(tmp_path / "c.jsonl", ["["]))
        with pytest.raises(InputError, match="is empty"):
            read(write(tmp_path / "d.jsonl", []))
        assert read(tmp_path / "a.jsonl", "generic")[0][0].rewards == (0.0,)

    def test_a_log_of_which_nothing_can_be_read_is_an_error_that_names_the_first_line(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"group": "a", "reward": "x"}])
        with pytest.raises(InputError, match=r"a\.jsonl:1 .*: holds no rollout .*not a number.*read as generic"):
            read(path)

    def test_missing_paths_and_empty_folders_are_named(self, tmp_path):
        with pytest.raises(InputError, match="does not exist"):
            read(tmp_path / "nowhere")
        with pytest.raises(InputError, match="holds no log"):
            read(tmp_path)


class TestFormatsOfOnesOwn:
    """A function of one line, named like any part."""

    MODULE = '''
from turntree.logs.generic import LogFormat

def read(row, *, team: str = "team"):
    if "note" in row:
        return None
    return {"group": row[team], "reward": row["points"], "actions": row["did"]}

class Whole(LogFormat):
    """Not one rollout a line: the file is read by the format itself."""
    def groups(self, paths, report):
        from turntree.logs.groups import LoggedGroup, LoggedRollout
        report.saw_group(2)
        yield LoggedGroup(id="g", task="t", rollouts=(LoggedRollout(actions=("a",), reward=1.0),) * 2)

class Lines(LogFormat):
    def row(self, row):
        return read(row)

class Neither:
    pass
'''

    @pytest.fixture
    def log(self, tmp_path, monkeypatch):
        (tmp_path / "own_logs.py").write_text(self.MODULE)
        monkeypatch.chdir(tmp_path)
        rows = [{"team": "a", "points": i, "did": ["go"]} for i in range(2)]
        return write(tmp_path / "log.jsonl", [{"note": "begins"}, *rows, {"team": "a", "did": []}])

    @pytest.mark.parametrize("name", ["read", "Lines"])
    def test_it_gives_the_fields_of_the_generic_format_and_what_it_drops_is_counted_by_reason(self, log, name):
        (group,), report = read(log, f"own_logs:{name}")
        assert group.rewards == (0.0, 1.0) and group.rollouts[0].actions == ("go",)
        assert report.dropped == {"left out by the format": 1, "the format raised KeyError": 1}
        assert report.first["the format raised KeyError"] == f"{log}:4 ('points')"

    def test_its_keyword_parameters_are_options(self, log):
        with pytest.raises(InputError, match=r"3 the format raised KeyError"):
            read(log, "own_logs:read", team="side")
        with pytest.raises(ConfigError, match=r"'log_format.tem': unknown key; did you mean 'team'\?"):
            read(log, "own_logs:read", tem="side")

    def test_a_class_reads_whole_files_and_what_can_do_neither_is_refused(self, log):
        (group,), report = read(log, "own_logs:Whole")
        assert group.rewards == (1.0, 1.0) and report.format == "own_logs:Whole"
        with pytest.raises(InputError, match="gave Neither, which is neither a LogFormat nor a function"):
            read(log, "own_logs:Neither")


def test_an_option_that_the_recognised_format_does_not_have_is_an_error(tmp_path):
    path = write(tmp_path / "log.jsonl", [{"group": "a", "reward": 1.0}] * 2)
    with pytest.raises(ConfigError, match=r"'log_format\.turn_separator': unknown key"):
        read(path, turn_separator="x")


def test_a_group_that_is_spread_over_several_files_is_said(tmp_path):
    for rank in range(2):
        write(tmp_path / "one" / f"rank_{rank}.jsonl", [{"group": "a", "iteration": 3, "reward": float(rank)}] * 2)
        write(tmp_path / "two" / f"{rank}.jsonl", [{"group": "a", "iteration": rank, "reward": 1.0}] * 2)
    groups, report = read(tmp_path / "one")
    assert len(groups) == 2 and "several files" in str(report.notes)
    assert not read(tmp_path / "two")[1].notes


@pytest.mark.parametrize("format", ["auto", "generic", "verl", "trl", "turntree", "trees"])
def test_a_pipe_without_a_writer_is_refused_by_every_format_and_not_waited_for(tmp_path, format):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(InputError, match="pipe"):
        list(open_log([tmp_path / "log.jsonl"], Part(format)))
