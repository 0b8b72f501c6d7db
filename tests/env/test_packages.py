"""Environments of other packages, on the real packages (`make test-environments`): each keeps the laws, and an episode
of known actions ends with the reward that it must have. A package that is absent is skipped."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Environment, Observation
from turntree.env.check import Finding, check_environment
from turntree.env.tasks import open_tasks

SERVERS = Path(__file__).parent / "servers"
ROWS = [{"prompt": f"Add {a} and {a + 1}.", "answer": str(2 * a + 1)} for a in range(30)]


def opened(name: str, split: str = "train", count: int = 2, **options: Any) -> list[Environment]:
    with open_tasks(Part(name, options), {split: count}) as tasks:
        return list(tasks.of(split))


def played(task: Environment, *actions: str | ToolCall) -> Observation:
    """The last answer to these messages."""
    task.reset()
    last = None
    for action in actions:
        call = () if isinstance(action, str) else (action,)
        last = task.step(Message("assistant", action if isinstance(action, str) else "", call))
    assert last is not None
    return last


def grave(tasks: Sequence[Environment]) -> list[Finding]:
    return [finding for task in tasks for finding in check_environment(task) if finding.grave]


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("gymnasium")

    @pytest.mark.parametrize(
        "name", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1", "CartPole-v1", "Pendulum-v1"]
    )
    def test_laws(self, name: str) -> None:
        tasks = opened(f"gymnasium:{name}")
        assert grave(tasks) == []
        task = tasks[0]
        task.reset()
        assert task.fork()._can_copy is True  # pyright: ignore

    def test_the_shortest_path_over_the_lake_wins(self) -> None:
        lake = opened("gymnasium:FrozenLake-v1", make={"is_slippery": False})[0]
        over = played(lake, "down", "Down", "right", "right", "1", "right")
        assert (over.done, over.success, over.reward, over.messages[0].content) == (True, True, 1.0, "15")
        hole = played(lake.fork(), "right", "down")
        assert (hole.done, hole.success, hole.reward) == (True, False, 0.0)

    def test_the_action_is_what_stands_behind_a_thought(self) -> None:
        lake = opened("gymnasium:FrozenLake-v1", make={"is_slippery": False})[0]
        assert played(lake, "<think>Left is 0.</think>\n\nright").messages[0].content == "1"

    def test_what_is_no_action_is_answered_with_what_would_be_one(self) -> None:
        lake = opened("gymnasium:FrozenLake-v1")[0]
        said = "That is not an action. Reply with one action: left, down, right, up."
        assert played(lake, "jump").messages[0].content == said

    def test_observations_of_several_parts_and_drawings(self) -> None:
        hand = opened("gymnasium:Blackjack-v1")[0].reset()[0].content
        assert len(hand.splitlines()[-1].split("; ")) == 3
        assert "[S]FFF" in opened("gymnasium:FrozenLake-v1", ansi=True)[0].reset()[0].content

    def test_the_walk_along_the_cliff_is_counted(self) -> None:
        cliff = opened("gymnasium:CliffWalking-v1", success=-13)[0]
        over = played(cliff, "up", *["right"] * 11, "down")
        assert (over.done, over.success, over.reward) == (True, True, -13.0)

    def test_a_fraction_is_no_action_where_numbers_are_whole(self) -> None:
        """It was cut off, and another action was played than the one that was said."""
        from gymnasium import spaces

        from turntree_interop.gymnasium import read

        for space, said in ((spaces.MultiDiscrete([3, 3]), "[1.7, 2]"), (spaces.Box(0, 9, (2,), np.uint8), "[256, 0]")):
            assert read(space, "[1, 2]").tolist() == [1, 2]
            for wrong in (said, "[1e400, 0]", '["a", "b"]'):
                with pytest.raises(ValueError):
                    read(space, wrong)

    @pytest.mark.parametrize("which", ["action_space", "observation_space"])
    def test_a_space_without_text_is_refused_before_any_episode(self, which: str) -> None:
        """As late as in the first turn it would have censored every rollout."""
        import gymnasium

        def odd() -> gymnasium.Env[Any, Any]:
            made = gymnasium.make("FrozenLake-v1").unwrapped
            setattr(made, which, gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2)))
            return made

        gymnasium.register(f"Odd{which}-v0", odd)
        with pytest.raises(InputError, match="of space Sequence"):
            opened(f"gymnasium:Odd{which}-v0", instructions="Play.")

    def test_it_is_closed_when_its_episode_is_over(self) -> None:
        import gymnasium

        closed: list[object] = []

        def watched() -> gymnasium.Env[Any, Any]:
            made = gymnasium.make("FrozenLake-v1").unwrapped
            made.close = lambda: closed.append(made)  # type: ignore[method-assign]
            return made

        gymnasium.register("Watched-v0", watched)
        (task,) = opened("gymnasium:Watched-v0", count=1)
        assert len(closed) == 1, "the one that was looked at"
        task.reset(), task.reset()
        assert len(closed) == 2

    @pytest.mark.filterwarnings("ignore:.*render_mode")
    @pytest.mark.parametrize(
        ("name", "options", "said"),
        [
            ("CartPole-v1", {"ansi": True}, r"cannot draw as text \(its render modes: human, rgb_array\)"),
            ("FrozenLake-v1", {"actions": ("a", "b")}, "names 2 actions, and 'FrozenLake-v1' has 4 actions"),
            ("Pendulum-v1", {"actions": ("a", "b")}, "has actions of space Box, which have no names"),
        ],
    )
    def test_options_that_the_game_does_not_have_are_refused(self, name: str, options: Any, said: str) -> None:
        with pytest.raises(InputError, match=said):
            opened(f"gymnasium:{name}", **options)

    def test_an_unknown_id_is_one_line(self) -> None:
        with pytest.raises(InputError, match="doesn't exist"):
            opened("gymnasium:Nothing-v0")


class TestVerifiers:
    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("verifiers.envs.multiturn_env")
        monkeypatch.syspath_prepend(SERVERS)

    @pytest.mark.parametrize("name", ["single", "multi", "tool"])
    def test_laws(self, name: str) -> None:
        assert grave(opened(f"verifiers:verifiers_environments:{name}")) == []

    def test_an_installed_environment_is_loaded_by_its_id(self) -> None:
        task = opened("verifiers:verifiers-environments", load={"kind": "multi"})[0]
        assert played(task, "x").done is False

    def test_one_turn_is_scored_by_the_rubric(self) -> None:
        task = opened("verifiers:verifiers_environments:single")[0]
        right = str(int(task.reset()[0].content.split()[2]) + 1)
        assert played(task.fork(), right).reward == 1.0
        assert played(task.fork(), "no").success is False

    def test_a_game_goes_on_until_it_says_that_it_is_over(self) -> None:
        task = opened("verifiers:verifiers_environments:multi", "dev", 1)[0]
        right = str(int(task.reset()[0].content.split()[2]) + 1)
        assert played(task, "x").messages[0].content == "wrong, try 1"
        twin = task.fork()
        assert twin.step(Message("assistant", "x")).messages[0].content == "wrong, try 2"
        over = task.step(Message("assistant", right))
        assert (over.messages[0].content, over.done, over.reward) == ("right", True, 1.0)
        lost = played(opened("verifiers:verifiers_environments:multi")[0], *["x"] * 5)
        assert (lost.done, lost.success, lost.reward) == (True, False, 0.0)

    def test_its_tools_are_called(self) -> None:
        task = opened("verifiers:verifiers_environments:tool")[0]
        assert task.tools[0]["function"]["name"] == "add"
        number = int(task.reset()[0].content.split()[2])
        told = played(task, ToolCall("add", {"a": number, "b": 1}, "c"))
        assert (told.messages[0].role, told.messages[0].content) == ("tool", str(number + 1))
        assert task.step(Message("assistant", str(number + 1))).reward == 1.0

    @pytest.mark.parametrize("quiet", ["", "verifiers", "all"])
    def test_a_reward_function_that_fails_censors(self, quiet: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """However quiet logging is."""
        (task,) = opened("verifiers:verifiers_environments:broken", count=1)
        logger = logging.getLogger("verifiers")
        monkeypatch.setattr(logger, "level", logging.CRITICAL if quiet == "verifiers" else logger.level)
        monkeypatch.setattr(logger.manager, "disable", logging.CRITICAL if quiet == "all" else 0)
        logger.manager._clear_cache()  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentFault, match="Error calling reward function"):
            played(task, "x")

    def test_an_episode_that_a_limit_or_a_fault_ends_is_cleaned_up(self) -> None:
        """A fork shares what the state names: only the episode itself cleans up."""
        import verifiers_environments

        (task,) = opened("verifiers:verifiers_environments:multi", count=1)
        played(task, "x")
        name, until = task._held._state["trajectory_id"], time.monotonic() + 10  # type: ignore[attr-defined]
        task.fork()
        time.sleep(0.5)
        assert name not in verifiers_environments.CLEANED
        task.reset()
        while name not in verifiers_environments.CLEANED and time.monotonic() < until:
            time.sleep(0.01)
        assert verifiers_environments.CLEANED.count(name) == 1


class TestMcp:
    @pytest.fixture
    def name(self, tmp_path: Path) -> str:
        mcp = pytest.importorskip("mcp")
        if not hasattr(mcp, "Client"):
            pytest.skip("needs mcp 2")
        self.rows = tmp_path / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return f"mcp:{sys.executable} {Path(__file__).with_name('mcp_server.py')}"

    @pytest.mark.parametrize("own", [False, True])
    def test_laws_and_an_episode(self, name: str, own: bool) -> None:
        part = Part(name, {"tasks": str(self.rows), "own": own})
        with open_tasks(part, {"train": 1}) as tasks:
            assert grave(tasks.of("train")) == []
            task = tasks.of("train")[0]
            number = int(task.reset()[0].content.split()[1])
            told = task.step(Message("assistant", "", (ToolCall("add", {"a": number, "b": number + 1}, "c"),)))
            assert told.messages == (Message("tool", str(2 * number + 1), tool_call_id="c", name="add"),)
            twin = task.fork()
            assert twin.step(Message("assistant", told.messages[0].content)).success is True
            assert task.step(Message("assistant", "7000")).success is False


class TestOpenEnv:
    @pytest.fixture(params=["guess", "mcp"])
    def server(self, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
        pytest.importorskip("openenv.core.env_server")
        port = {"guess": 18763, "mcp": 18764}[request.param]
        command = [sys.executable, str(SERVERS / "openenv_server.py"), request.param, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield request.param, f"openenv:http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()

    def test_laws_and_an_episode(self, server: tuple[str, str]) -> None:
        kind, name = server
        assert grave(opened(name, count=1)) == []
        task = opened(name, show="text" if kind == "guess" else "result")[0]
        if kind == "guess":
            assert task.reset()[0].content == "guess a number from 0 to 9"
            told = [task.step(Message("assistant", str(number))) for number in range(10) if not task_over(task)]
            assert [one.success for one in told if one.done] == [True]
            return
        assert task.tools[0]["function"]["name"] == "add"
        assert "5" in played(task, ToolCall("add", {"a": 2, "b": 3}, "c")).messages[0].content

    def test_no_server_is_one_line(self) -> None:
        pytest.importorskip("openenv.core")
        with pytest.raises(InputError, match="no OpenEnv server answers"):
            opened("openenv:http://127.0.0.1:1")


def task_over(task: Any) -> bool:
    return task._answers[-1].done
