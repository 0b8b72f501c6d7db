"""Command line, dataclass and documentation are one: options are made from the configuration's own keys."""

import json
import re
import subprocess
import sys

import pytest

from turntree.cli.common import finish
from turntree.cli.config import stage_commands
from turntree.cli.main import cli
from turntree.cli.options import default_text, key_of
from turntree.core import parts
from turntree.core.config import Part, defaults, nested, overlaid, section_of, to_value
from turntree.core.errors import InputError
from turntree.core.keys import argument_meanings, keys, option_meanings
from turntree.core.progress import notice
from turntree.train.config import LossConfig, PivotConfig

STAGES = dict(stage_commands(cli))


def help_of(turntree, stage):
    """The options of --help with what is said of each, in one line."""
    text = turntree(*stage.split(), "--help").stdout.partition("Options:")[2]
    rows = re.split(r"\n  (?=--?\w)", re.sub(r"-h, --help.*", "", text, flags=re.DOTALL))
    return {row.strip().split()[0].rstrip(","): " ".join(row.split()) for row in rows if row.strip()}


def bare(text):
    return "".join(text.split())  # long values are broken anywhere


@pytest.mark.parametrize("stage", ["train online", "traces household", "traces record", "sft --traces x", "select x"])
def test_a_forgotten_out_is_missed_before_anything_is_read(turntree, stage):
    assert "Missing option '--out'" in turntree.error(*stage.split())


@pytest.mark.parametrize("stage", STAGES)
def test_help_and_config_say_the_same_of_every_option(turntree, stage):
    """The law: the default that --help shows is the one that `turntree config` lists, of a key that exists."""
    listed = {row["key"]: row for row in turntree.json("config", *stage.split())["keys"]}
    shown = help_of(turntree, stage)
    for option, target in STAGES[stage].options.items():
        key = key_of(target)
        assert key in listed, f"{option} stands for {key}, which is no key"
        if not option.startswith("--"):
            continue
        row = listed[key]
        assert option in row["option"].split(", ")
        assert row["meaning"], f"{key} has an option and no documentation"
        said = re.findall(r"\[(?:default: [^\]]*|required[^\]]*)\]", shown[option])
        assert [bare(one) for one in said] == [bare(row["shown"])] * bool(row["shown"])


@pytest.mark.parametrize("stage", STAGES)
def test_an_example_of_help_fits_80_columns_and_can_be_pasted(turntree, monkeypatch, stage):
    monkeypatch.setenv("COLUMNS", "80")
    shown = turntree(*stage.split(), "--help").stdout
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    for block in shown.partition("\nOptions:")[0].split("Example: ")[1:]:
        commands = re.sub(r"\\\n\s+", "", block.partition("\n\n")[0]).splitlines()
        assert [line for line in commands if not line.strip().startswith("turntree ")] == []


@pytest.mark.parametrize("kind", parts.KINDS)
def test_every_option_of_every_part_that_comes_along_has_a_meaning(kind):
    for name in parts.names(kind):
        found = parts.load(kind, name)
        said = option_meanings(found)
        for option, about in found.options().items():
            assert section_of(about.hint) is not None or said.get(option), f"{kind} {name}: {option}"


def documented(split, count, *, seed, lives=3, pace=1.0, mute=False):
    """Some tasks.

    Args:
        lives (int): How often one may fail: that is,
            over all floors.
        pace: Steps a second.

    Returns:
        mute: no option
    """


def test_options_of_a_function_are_documented_by_its_docstring():
    said = {"lives": "How often one may fail: that is, over all floors.", "pace": "Steps a second."}
    assert argument_meanings(documented) == said


def step(here, name):
    """One name of a dotted key further down; None where a part deeper down leaves it to its default."""
    if name.isdecimal():
        return here[int(name)]
    options = here.options if isinstance(here, Part) else here
    return options.get(name) if isinstance(options, dict) else getattr(here, name)


@pytest.mark.parametrize("stage", STAGES)
def test_what_config_lists_is_what_the_stage_runs_with(stage):
    """Every listed default is the value that the dataclass really has; every key has a meaning."""
    cls = STAGES[stage].config_class
    listed = list(keys(cls))
    needed = {key.name: "given" for key in listed if key.required and not key.off}
    if "tasks" in needed:
        needed["tasks"] = ("given",)
    if "environment" in needed:
        needed["environment"] = Part("household")
    if stage == "train pivot":
        needed["pivots"] = "given"  # or own states
    config = cls(**needed)
    for key in listed:
        assert key.meaning, f"{key.name} has no line of text below its field"
        if key.required or key.off or key.name in needed or ".environment." in f".{key.name}.":
            continue
        here = parts.resolved(config)
        names = key.name.split(".")
        for name in names:
            here = step(here, name)
        if here is not None or not {"gate", "brancher"} & set(names[:-1]):
            value = here.name if isinstance(here, Part) else json.loads(json.dumps(to_value(here)))
            assert value == json.loads(json.dumps(key.default)), key.name


def test_one_truth_of_the_defaults_that_differed(turntree):
    """`--kl` said .02 and the dataclass .01; `--max-turns` said 16 and the dataclass 30."""
    from turntree.stages.config import TrainOnlineConfig, TrainPivotConfig

    assert "[default: 0.02]" in help_of(turntree, "train pivot")["--kl"]
    assert PivotConfig().loss == TrainPivotConfig(pivots="p").train.loss == LossConfig(kl_coefficient=0.02)
    shown = help_of(turntree, "train online")
    episodes = TrainOnlineConfig().train
    assert f"[default: {episodes.max_turns}]" in shown["--max-turns"] and episodes.max_turns == 16
    assert f"[default: {episodes.sampling.max_tokens}]" in shown["--max-tokens"]


def dry(turntree, *arguments):
    return json.loads(turntree(*arguments, "--dry-run").stdout)


def test_later_sources_win(turntree, tmp_path):
    """Defaults < --config < short options < --set."""
    file = tmp_path / "c.toml"
    file.write_text('pivots = "p"\n[train]\nsteps = 7\ngroups = 5\nseed = 3\n[train.loss]\nkl_coefficient = 0.5\n')
    command = ("train", "pivot", "--out", tmp_path / "r", "--config", file, "--steps", 8, "--kl", 0.6)
    config = dry(turntree, *command, "--set", "train.loss.kl_coefficient=0.7")["config"]["train"]
    assert (config["seed"], config["groups"], config["steps"]) == (3, 5, 8)
    assert config["loss"]["kl_coefficient"] == 0.7 and config["group_size"] == PivotConfig().group_size
    assert not (tmp_path / "r").exists()


def test_an_option_that_is_given_as_its_default_still_overrides_the_file(turntree, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('pivots = "p"\n[train]\nsteps = 7\n')
    default = PivotConfig().steps
    found = dry(turntree, "train", "pivot", "--out", tmp_path, "--config", file, "--steps", default)
    assert found["config"]["train"]["steps"] == default


def test_what_a_dry_run_prints_is_a_configuration_file(turntree, tmp_path):
    first = dry(turntree, "profile", "--traces", "t", "--out", "p", "--rollouts", 6, "--threshold", 0.4)
    assert first["config"]["profile"]["adaptive"]["threshold"] == 0.4  # a key of a section switches it on
    file = tmp_path / "config.json"
    file.write_text(json.dumps(first))
    assert dry(turntree, "profile", "--config", file, "--out", "p") == first
    assert "is of stage 'profile', not 'sft'" in turntree.error("sft", "--config", file, "--out", tmp_path / "r")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "train.loss.kl_coeficient=1"), "'train.loss.kl_coeficient': unknown key; did you mean 'kl_coeff"),
        (("--set", "model.size=1"), "field 'model': {"),
        (("--set", "steps=3"), "'steps': unknown key; did you mean 'train.steps'?"),
        (("--set", "train.local.cut_turns=fail"), "'train.local': unknown key; did you mean 'train.cut_turns'?"),
        (("--set", "train.steps"), "has no '='"),
        (("--set", "=3"), "has no key"),
        (("--set", "loggers={}"), "'loggers': {} is not of type tuple"),
        (("--kl", "x"), "not a valid float"),
        (("--config", "absent.toml"), "absent.toml"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(turntree, tmp_path, arguments, said):
    assert said in turntree.error("train", "pivot", "p", "--out", tmp_path / "r", *arguments)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.toml", "[train.loss]\nkl_coeficient = 1\n", "field 'train.loss.kl_coeficient': unknown key"),
        ("c.toml", "[train]\nsteps = '3'\n", "field 'train.steps': '3' is not of type int"),
        ("c.json", '{"stage": "train pivot", "config": 7}', "holds no keys"),
    ],
)
def test_a_wrong_key_or_value_of_a_file_is_named_in_full_with_the_file(turntree, tmp_path, name, text, said):
    file = tmp_path / name
    file.write_text(text)
    command = ("train", "pivot", "p", "--out", tmp_path / "r", "--config", file)
    assert f"{file}: {said}" in turntree.error(*command)
    over = turntree.error(*command, "--steps", 0)  # the option wins: the file is not to blame
    assert "steps" not in said or (str(file) not in over and "at least 1" in over)


def test_config_without_a_stage_lists_the_stages_and_a_stage_is_found_by_a_part_of_its_name(turntree):
    assert "train online" in turntree.json("config")["stages"]
    assert "did you mean 'train online'?" in turntree.error("config", "online")
    assert "did you mean 'train online' or 'train pivot'?" in turntree.error("config", "train")


def test_options_of_a_part_are_given_like_those_of_the_command(turntree, tmp_path):
    command = ("train", "online", "--out", tmp_path / "r")
    found = dry(turntree, *command, "--environment", "household", "--difficulty", "hard", "--offset=3")["config"]
    assert (found["environment"]["difficulty"], found["environment"]["offset"]) == ("hard", 3)
    assert "did you mean 'difficulty'" in turntree.error(*command, "--dificulty", "hard")
    listed = {row["key"] for row in turntree.json("config", "train", "online", "--environment", "qa")["keys"]}
    assert "environment.sandbox.limits.seconds" in listed and "environment.difficulty" not in listed


def test_items_are_named_by_number(turntree, tmp_path):
    command = ("train", "online", "--out", tmp_path / "r", "--filter", "dapo", "--filter", "greso")
    filters = dry(turntree, *command, "--set", "filters.1.easy_target=0.5")["config"]["filters"]
    assert [(each["name"], each.get("easy_target")) for each in filters] == [("dapo", None), ("greso", 0.5)]


def test_options_of_a_part_that_is_off_switch_on_the_usual_one(turntree, tmp_path):
    command = ("train", "online", "--out", tmp_path / "r")
    assert dry(turntree, *command)["config"]["brancher"] is None
    entropy = dry(turntree, *command, "--probe-tokens", 3)["config"]["brancher"]
    assert (entropy["name"], entropy["probe_tokens"], entropy["tau"]) == ("entropy", 3, None)
    coin = dry(turntree, *command, "--brancher", "random", "--probe-tokens", 3)["config"]["brancher"]
    assert (coin["name"], coin["probe_tokens"]) == ("random", 3)
    random = dry(turntree, *command, "--gate", "random", "--set", "gate.rate=0.5")["config"]["gate"]
    assert random == {"name": "random", "turn": 10, "rate": 0.5}
    assert "unknown key" in turntree.error(*command, "--gate", "random", "--gate-threshold", 0.5)


def test_rewards_loggers_and_kept_trees_are_rows_of_the_same_table(turntree, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("keep_trees = 3\n")
    command = ("train", "online", "--out", tmp_path / "r", "--config", file)
    assert dry(turntree, *command)["config"]["keep_trees"] == 3
    assert dry(turntree, *command, "--keep-trees", "all")["config"]["keep_trees"] is None
    found = dry(turntree, *command, "--reward", "success=0.5", "--reward", "environment", "--log", "tensorboard")
    assert found["config"]["rewards"] == [{"name": "success", "weight": 0.5}, {"name": "environment"}]
    assert found["config"]["loggers"] == [{"name": "tensorboard"}] and found["config"]["keep_trees"] == 3


def test_help_reads_no_torch():
    """Of everything that says what there is: a configuration is plain values."""
    stages = [list(name.split()) for name in STAGES if name != "quickstart"]  # of the heavy stage itself
    code = (
        "import sys\nfrom turntree.cli.main import cli\n"
        f"for words in [[], *{stages!r}]:\n    cli.main([*words, '--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'scipy.stats') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-300:] + done.stderr


def test_a_key_without_default_is_shown_as_required():
    assert default_text(next(key for key in keys(STAGES["sft"].config_class) if key.name == "traces")) == "[required]"


@pytest.mark.parametrize("stage", STAGES)
def test_a_field_that_is_called_name_does_not_make_a_section_a_part(stage):
    """Setting it drops nothing of the section, before or after another key of it."""
    cls = STAGES[stage].config_class
    names = [key.name for key in keys(cls) if not key.off]
    for above in {name.removesuffix(".name") for name in names if name.endswith(".name")}:
        for other in (name for name in names if name.startswith(f"{above}.") and name != f"{above}.name"):
            one, two = nested(f"{above}.name", "odd"), nested(other, "other")
            plain = defaults(cls)
            after = overlaid(overlaid(plain, one, cls), two, cls)
            assert after == overlaid(overlaid(plain, two, cls), one, cls), other


def test_what_data_says_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finish({}, None, ["1 unknown key \x1b[31mred\x1b]0;title\x07", "zwei\tWörter"])
    notice("of a tool: \x1b[2J")
    told = capsys.readouterr()
    assert told.out == "1 unknown key \\x1b[31mred\\x1b]0;title\\x07\nzwei\tWörter\n"
    assert "\x1b" not in told.err + str(InputError("has \x1b[31m", field="a"))
