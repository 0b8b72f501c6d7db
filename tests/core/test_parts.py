"""One door for all parts: a name, a name with an argument, or module:object of one's own."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from turntree.core import parts
from turntree.core.config import Part, from_mapping, nested, overlaid, to_mapping
from turntree.core.errors import ConfigError, InputError

MODULE = '''
from dataclasses import dataclass, field
from turntree.core.protocols import Gate

@dataclass(frozen=True)
class Limits:
    seconds: float = 1.0
    times: int = 1

class Never(Gate):
    def decide(self, group):
        return None

class Pair(Never, tuple):
    pass

@dataclass(frozen=True, kw_only=True)
class Patient(Never):
    """A default that a factory makes, and that differs from the class's own."""
    limits: Limits = field(default_factory=lambda: Limits(seconds=9.0))

class EveryOther(Never):
    """A gate that is built with options, and with the seed that the stage provides."""
    def __init__(self, seed: int, *, turn: int, rate: float = 0.5, limits: Limits = Limits()):
        self.seed, self.turn, self.rate, self.limits = seed, turn, rate, limits

@dataclass(frozen=True)
class Draws:
    """Options that are looked at together; the seed is the stage's."""
    rate: float
    seed: int | None = None
    limits: Limits = Limits()

def drawing(config: Draws, *, turn: int = 2):
    return Pair((config, turn))

def perhaps(seed: int, config: Draws | None = None):
    return Pair((config, seed))

def judge(state, action, *, strict: bool = False):
    return (state, action, strict)

READY = Never()
NOTHING = object()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("turn", [1, 2])
def test_modules_of_two_tests_may_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Pages of the documentation and these tests share a process, and a module of one must not hide another's."""
    (tmp_path / "same_name.py").write_text(f"TURN = {turn}")
    monkeypatch.chdir(tmp_path)
    assert parts.load("gates", "same_name:TURN").target == turn


def test_a_class_from_the_current_folder_is_built_with_its_options_and_what_the_stage_provides(folder: Path) -> None:
    part = Part("my_parts:EveryOther", {"turn": 3, "limits": {"seconds": 2}})
    gate = parts.build("gates", part, seed=7)
    assert (gate.seed, gate.turn, gate.rate, gate.limits.seconds) == (7, 3, 0.5, 2.0)


@pytest.mark.parametrize(("factory", "own"), [("drawing", {"turn": 2}), ("perhaps", {})])
def test_the_fields_of_a_dataclass_config_are_options(folder: Path, factory: str, own: dict[str, object]) -> None:
    part = parts.resolve("gates", Part(f"my_parts:{factory}", {"rate": 1, "limits": {"times": 4}}))
    assert part.options == {"rate": 1.0, "limits": {"seconds": 1.0, "times": 4}, **own}
    config, _ = parts.build("gates", part, seed=7)
    assert (config.rate, config.seed, config.limits.times) == (1.0, 7, 4)
    with pytest.raises(ConfigError, match=r"'gate\.rate': is missing"):
        parts.build("gates", Part(f"my_parts:{factory}"), seed=7)
    with pytest.raises(ConfigError, match=r"'gate\.config': unknown key"):
        parts.build("gates", Part(f"my_parts:{factory}", {"config": {"rate": 1.0}}), seed=7)


def test_the_resolved_part_spells_out_every_option_as_json(folder: Path) -> None:
    resolved = parts.resolve("gates", Part("my_parts:EveryOther", {"turn": 3}))
    assert resolved.options == {"turn": 3, "rate": 0.5, "limits": {"seconds": 1.0, "times": 1}}
    assert json.loads(json.dumps(resolved.options)) == resolved.options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"turn": 3, "rat": 1.0}, "'gate.rat': unknown key; did you mean 'rate'?"),
        ({"turn": 3, "seed": 1}, "'gate.seed': unknown key; known keys: limits, rate, turn"),
        ({}, "'gate.turn': is missing"),
        ({"turn": "three"}, "'gate.turn': 'three' is not of type int"),
    ],
)
def test_wrong_options_are_refused_by_name(folder: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        parts.build("gates", Part("my_parts:EveryOther", options), seed=0)


def test_a_plain_function_is_the_verifier_itself_and_its_keywords_are_options(folder: Path) -> None:
    assert parts.build("verifiers", Part("my_parts:judge"))(1, 2) == (1, 2, False)
    assert parts.build("verifiers", Part("my_parts:judge", {"strict": True}))(1, 2) == (1, 2, True)


def test_an_object_that_is_ready_is_taken_as_it_is(folder: Path) -> None:
    assert parts.build("gates", Part("my_parts:READY"), seed=0) is sys.modules["my_parts"].READY
    with pytest.raises(ConfigError, match="has no keys"):
        parts.build("gates", Part("my_parts:READY", {"turn": 1}), seed=0)
    with pytest.raises(InputError, match="'my_parts:NOTHING' gave object, which has no first_look, decide"):
        parts.build("gates", Part("my_parts:NOTHING"), seed=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is empty"),
        ("nonsense", "there is no gate 'nonsense'; registered:"),
        ("my_parts:", "there is no gate 'my_parts:'"),
        ("my_parts:Other", "has no 'Other'"),
        ("no_such_module:Gate", "no module 'no_such_module' .*registered: divergence"),
        ("broken:Gate", "importing 'broken' raised ZeroDivisionError"),
        ("needs:Gate", "needs 'a_package_that_is_missing', which is not installed"),
        ("json:Gate", "is hidden by"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_line(folder: Path, name: str, said: str) -> None:
    (folder / "broken.py").write_text("1 / 0")
    (folder / "needs.py").write_text("import a_package_that_is_missing")
    (folder / "json.py").write_text("Gate = 1")
    with pytest.raises(InputError, match=said) as caught:
        parts.load("gates", name)
    assert "\n" not in str(caught.value)


def test_a_mapping_that_names_some_keys_of_a_default_leaves_the_others(folder: Path) -> None:
    assert parts.resolve("gates", Part("my_parts:Patient")).options == {"limits": {"seconds": 9.0, "times": 1}}
    built = parts.build("gates", Part("my_parts:Patient", {"limits": {"times": 3}}))
    assert (built.limits.seconds, built.limits.times) == (9.0, 3)


def test_an_edited_module_has_another_identity(folder: Path) -> None:
    before = parts.identity("gates", Part("my_parts:EveryOther"))
    (folder / "my_parts.py").write_text(MODULE + "\n# edited\n")
    assert parts.identity("gates", Part("my_parts:EveryOther")) != before


@pytest.fixture
def registered(folder: Path) -> Path:
    """A distribution with entry points, as an installed package leaves it."""
    metadata = folder / "other_package-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 2.5\n")
    points = "[turntree.gates]\nevery_other = my_parts:EveryOther\n[turntree.environments]\ngame = my_world:tasks\n"
    (metadata / "entry_points.txt").write_text(points)
    world = "def tasks(split, count, *, seed, argument, size: int = 3): return [(split, count, seed, argument, size)]\n"
    (folder / "my_world.py").write_text(world)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return folder


def test_an_entry_point_is_a_name_and_its_distribution_is_the_identity(registered: Path) -> None:
    assert "every_other" in parts.names("gates")
    assert parts.build("gates", Part("every_other", {"turn": 1}), seed=0).turn == 1
    assert parts.identity("gates", Part("every_other")) == "my_parts:EveryOther@other-package 2.5"


def test_what_follows_a_registered_name_is_its_argument(registered: Path) -> None:
    built = parts.build("environments", Part("game:Chess-v1", {"size": 8}), split="train", count=2, seed=0)
    assert built == [("train", 2, 0, "Chess-v1", 8)]
    with pytest.raises(InputError, match="'every_other' takes no argument"):
        parts.load("gates", "every_other:5")


# parts inside a configuration


@dataclass(frozen=True, kw_only=True)
class Stage:
    gate: Part | None = None
    environment: Part = field(default_factory=lambda: Part("game"))
    mode: Literal["a", "b"] = "a"


def test_a_part_in_a_configuration_is_one_mapping_of_its_name_and_options() -> None:
    stage = Stage(gate=Part("divergence", {"turn": 4}))
    value = to_mapping(stage)
    assert value == {"gate": {"name": "divergence", "turn": 4}, "environment": {"name": "game"}, "mode": "a"}
    assert from_mapping(Stage, value) == stage
    longer = from_mapping(Stage, overlaid(value, nested("gate.turn", 6)))
    assert longer == Stage(gate=Part("divergence", {"turn": 6}))
    sized = from_mapping(Stage, overlaid(value, nested("environment.size", 3)))
    assert sized == Stage(gate=stage.gate, environment=Part("game", {"size": 3}))
    assert from_mapping(Stage, overlaid(value, nested("gate", "random"))).gate == Part("random")
    with pytest.raises(ConfigError, match="names no part"):
        from_mapping(Stage, {"gate": {"turn": 4}})
