"""Every kind of foreign code, as small as it can be, that does at one place whatever it is told to."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib.machinery
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fault_drill import Corridor
from faults import FAULTS, Behave, Named, Odd
from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core.completion import Completion, Finished, Sampling
from turntree.core.config import Part
from turntree.core.errors import InputError, TurntreeError
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import FinishedGroup, Observation, TurnState
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict
from turntree.env.adapted import AdaptedEnvironment, Scored
from turntree.env.local import LocalPool
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree.env.tool_environment import ToolEnvironment
from turntree.env.tools.runtime import ToolRuntime, ToolRuntimeConfig
from turntree.env.tools.tool import ToolOutput, ToolSpec
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.rewards import RewardSum, WeightedReward
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.verify.user import UserVerifier

NOT_HERE = "cannot happen here, or nothing limits its time"
CENSORED, ENDS, TOLD, REFUSED, OFF, GOES_ON, NOTHING = (
    "censored", "ends the run", "told the policy", "refused", "switched off", "goes on", "decides nothing",
)  # fmt: skip
RENDERER = ChatRenderer(tiny_tokenizer())
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right")]
LEFT = Message("assistant", "left")
ASKED = (Message("user", "walk"),)
SECONDS = 0.3  # of a time limit that a hanging part meets


PARTS: dict[str, Callable[[Behave], str]] = {}
LIMITED: set[str] = set()  # the parts with a limit of time


def part(name: str, *, limited: bool = False) -> Callable[[Callable[[Behave], str]], Callable[[Behave], str]]:
    def entered(play: Callable[[Behave], str]) -> Callable[[Behave], str]:
        PARTS[name] = play
        LIMITED.update({name} if limited else ())
        return play

    return entered


# playing


def scheduled(environment: Any, rewards: RewardSum | None = None, *, engine: Any = None, **more: Any) -> str:
    """What becomes of two rollouts, by the scheduler."""
    episodes = EpisodeConfig(max_turns=2, sampling=Sampling(max_tokens=16))
    config = SchedulerConfig(episodes=episodes, group_size=2, max_retries=0)
    engine = engine or scripted()
    renderer = more.pop("renderer", RENDERER)
    (group,) = Scheduler(engine, renderer, config, rewards=rewards, **more).run([environment], seed=0)
    return of_verdicts(list(group.rewards.verdicts.values()))


def scripted(**more: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: WORDS[seed % 2], RENDERER.stop_ids, vocab_size=4096, **more)


def of_verdicts(verdicts: Sequence[Verdict]) -> str:
    rewards = {verdict.reward for verdict in verdicts}
    if rewards == {None}:
        assert all(verdict.reason for verdict in verdicts), "without a reason"
        return CENSORED
    return f"rewarded {sorted(map(str, rewards))}"


def stepped(environment: Any, action: Message = LEFT) -> str:
    """What becomes of one step in a pool: a fault, or an observation."""
    pool = LocalPool()
    session = pool.open(environment)
    pool.reset(session)
    (begun,) = pool.poll().values()
    assert begun.fault is None, begun.fault
    pool.step(session, action)
    (answer,) = pool.poll().values()
    if answer.fault is not None:
        return CENSORED
    assert answer.observation is not None
    told = answer.observation
    if told.done and told.reward is None and told.success is None:
        return CENSORED  # as an end without a word (tests/rollout/test_what_is_known.py)
    return f"rewarded {told.reward}" if told.done else GOES_ON


class Plain(Corridor):
    """Of one turn."""

    def __init__(self, behave: Behave) -> None:
        super().__init__("plain", 1)
        self.behave = behave

    def fork(self) -> Any:
        return type(self)(self.behave)


@part("environment: `step`")
def _(behave: Behave) -> str:
    class Steps(Plain):
        def step(self, action: Message) -> Observation:
            return behave()

    return scheduled(Steps(behave))


@part("environment: `reset`")
def _(behave: Behave) -> str:
    class Resets(Plain):
        def reset(self) -> tuple[Message, ...]:
            return behave()

    return scheduled(Resets(behave))


def _field(name: str) -> Callable[[Behave], str]:
    def play(behave: Behave) -> str:
        class Tells(Plain):
            def step(self, action: Message) -> Observation:
                return Observation(ASKED, **{"done": True, name: behave()})

        return scheduled(Tells(behave))

    return play


for _name in ("reward", "success", "done"):
    part(f"environment: `{_name}`")(_field(_name))


@part("environment in a worker process", limited=True)
def _(behave: Behave) -> str:
    pool = workers()
    session = pool.open(Named(next((name for name, one in FAULTS.items() if one is behave), "")))
    pool.reset(session)
    (begun,) = pool.poll(120).values()
    assert begun.fault is None, begun.fault
    pool.step(session, LEFT)
    (answer,) = pool.poll(120).values()
    pool.close(session)
    return CENSORED if answer.fault is not None else "an observation"


@functools.cache
def workers() -> ProcessPool:
    pool = ProcessPool(ProcessPoolConfig(workers=1, step_seconds=2.0))
    atexit.register(pool.shut_down)
    return pool


# plain classes and their tools


class Machine:
    """A plain class with one tool, which ends the episode."""

    _behave: Behave

    def reset(self) -> str:
        return "Press."

    def press(self) -> str:
        """Press."""
        return type(self)._behave()


PRESS = Message("assistant", "", (ToolCall("press", {}, "1"),))


def machine(behave: Behave, **more: Any) -> ToolEnvironment:
    kind = type("Press", (Machine,), {"_behave": staticmethod(behave), **more})
    return ToolEnvironment(kind, task_id="machine")


@part("plain class: a tool")
def _(behave: Behave) -> str:
    found = stepped(machine(behave), PRESS)
    return TOLD if found == GOES_ON else found


@part("plain class: an asynchronous tool")
def _(behave: Behave) -> str:
    async def press(self: Any) -> str:
        """Press."""
        return behave()

    found = stepped(machine(behave, press=press), PRESS)
    return TOLD if found == GOES_ON else found


def _attribute(name: str) -> Callable[[Behave], str]:
    def play(behave: Behave) -> str:
        own = {"get_reward": lambda self: behave()} if name == "get_reward" else {name: property(lambda self: behave())}
        return stepped(machine(lambda: "pressed", **own))

    return play


for _name in ("reward", "success", "get_reward"):
    part(f"plain class: `{_name}`")(_attribute(_name))


@part("plain class: `done`")
def _(behave: Behave) -> str:
    return stepped(machine(lambda: "pressed", reward=1.0, done=property(lambda self: behave())), PRESS)


@part("reward function of rows (TRL's)")
def _(behave: Behave) -> str:
    return scheduled(Scored(Plain(behave), lambda **_: behave(), {}))


@part("reward function of rows (TRL's): a number in its list")
def _(behave: Behave) -> str:
    return scheduled(Scored(Plain(behave), lambda **_: [behave()], {}))


@part("tool of a runtime", limited=True)
def _(behave: Behave) -> str:
    found = runtime(behave).call(ToolCall("press", {}, "1"))
    return CENSORED if found.status.value == "failed" else TOLD


class Press:
    spec, version, pure = ToolSpec("press", "", {"type": "object", "properties": {}}), "1", False

    def __init__(self, behave: Behave) -> None:
        self.behave = behave

    def call(self, arguments: Any, seconds: float) -> ToolOutput:
        return self.behave()


def runtime(behave: Behave) -> ToolRuntime:
    return ToolRuntime([Press(behave)], ToolRuntimeConfig(seconds=SECONDS, retries=0))


# packages


@contextlib.contextmanager
def modules(**found: Any) -> Iterator[None]:
    """Packages that are not installed, under their names (`__` for a dot)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in found.items():
            module = ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            patch.setitem(sys.modules, module.__name__, module)
        yield


class Discrete:
    n, start = 2, 0

    def contains(self, value: Any) -> bool:
        return True


def _gymnasium(place: str) -> Callable[[Behave], str]:
    from turntree_interop.gymnasium import GymnasiumGame

    class Game:
        action_space = observation_space = Discrete()
        behave: Behave

        def reset(self, seed: int) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            told = [0, 1.0, True, False, {}]
            given = type(self).behave()
            return given if place == "step" else [*told[: AT[place]], given, *told[AT[place] + 1 :]]

        def close(self) -> None: ...

    def play(behave: Behave) -> str:
        made = type("Game", (Game,), {"behave": staticmethod(behave)})
        with modules(gymnasium={"make": lambda name, **_: made()}):
            game = partial(GymnasiumGame, "Game", {}, ("left", "right"), "Play.", False, None, 0)
            return scheduled(AdaptedEnvironment(game, task_id="gymnasium"))

    return play


AT = {"reward": 1, "terminated": 2, "truncated": 3}
for _name in ("step", *AT):
    part(f"`gymnasium:` `{_name}`")(_gymnasium(_name))


def _openenv(place: str) -> Callable[[Behave], str]:
    from turntree_interop.openenv import OpenEnvGame

    def play(behave: Behave) -> str:
        class Client:
            def __init__(self, **_: Any) -> None: ...

            async def reset(self, **_: Any) -> Any:
                return SimpleNamespace(observation={"text": "hello"})

            async def step(self, payload: Any) -> Any:
                if behave is FAULTS["hangs"]:
                    await asyncio.sleep(60)
                if place == "step":
                    return behave()
                return SimpleNamespace(**{"observation": {"text": "on"}, "reward": None, "done": True, place: behave()})

            async def close(self) -> None: ...

        with modules(openenv__core={"GenericEnvClient": Client}):
            game = partial(OpenEnvGame, "http://x", {}, "text", "", None, 1.0, SECONDS - 10)
            return scheduled(AdaptedEnvironment(game, task_id="openenv", can_copy=False))

    return play


for _name in ("step", "reward", "done"):
    part(f"`openenv:` `{_name}`", limited=True)(_openenv(_name))


class Client:
    __abstractmethods__: frozenset[str] = frozenset()

    def __init__(self, *_: Any) -> None: ...


def _verifiers(place: str) -> Callable[[Behave], str]:
    from turntree_interop.verifiers import VerifiersGame

    def play(behave: Behave) -> str:
        async def same(state: Any, *_: Any) -> Any:
            return {"reward": None, "trajectory_id": "x", "prompt": ASKED}

        async def nothing(*_: Any) -> None: ...

        async def over(state: Any) -> bool:
            return True

        async def prompt(state: Any) -> Any:
            return [{"role": "user", "content": "hello"}]

        async def score(state: Any) -> None:
            if behave is FAULTS["hangs"]:
                await asyncio.sleep(60)
            given = behave()
            state["reward"] = given if place == "reward" else 1.0

        own = SimpleNamespace(
            init_state=same, setup_state=nothing, get_prompt_messages=prompt, add_trajectory_step=nothing,
            is_completed=over, cleanup=nothing, rubric=SimpleNamespace(score_rollout=score),
        )  # fmt: skip
        stubs = {
            "verifiers__clients": {"Client": Client},
            "verifiers__types": {"AssistantMessage": lambda **told: told, "ToolCall": lambda **told: told},
            "verifiers__utils__message_utils": {"maybe_normalize_messages": lambda found, field_name: found},
        }  # fmt: skip
        with modules(**stubs):
            return scheduled(AdaptedEnvironment(partial(VerifiersGame, own, {}, SECONDS), task_id="verifiers"))

    return play


part("`verifiers:` the rubric's reward", limited=True)(_verifiers("reward"))


def _tau2(place: str) -> Callable[[Behave], str]:
    from turntree_interop.tau2 import _Case, _Conversation

    def play(behave: Behave) -> str:
        kit = SimpleNamespace(has_tool=lambda name: True, tool_type=lambda name: SimpleNamespace(value="read"))

        class Bank:
            tools, user_tools = kit, None
            run_env_assertion = staticmethod(lambda due, raise_assertion_error: behave())
            make_tool_call = staticmethod(lambda name, requestor, **_: behave())
            sync_tools = staticmethod(lambda: None)
            to_json_str = staticmethod(lambda answer: json.dumps(answer, default=str))

        domain: Any = SimpleNamespace(begin=lambda case: Bank(), policy="Be kind.", simulator=lambda case: None)
        case = _Case("a", ("Hello.",), False, assertions=("due",), basis=frozenset({"ENV_ASSERTION"}))
        task = AdaptedEnvironment(partial(_Conversation, domain, case), task_id="tau2")
        if place == "assertion":
            return scheduled(task)
        found = stepped(task, PRESS)
        return TOLD if found == GOES_ON else found

    return play


part("`tau2:` a tool")(_tau2("tool"))
part("`tau2:` an assertion")(_tau2("assertion"))


@part("`mcp:` a tool", limited=True)
def _(behave: Behave) -> str:
    from turntree_interop.mcp import McpGame

    make = partial(McpGame, runtime(behave), weakref.WeakSet(), "server", ASKED, "yes")
    found = stepped(AdaptedEnvironment(make, task_id="mcp", can_copy=False), PRESS)
    return TOLD if found == GOES_ON else found


# judging


@part("reward function")
def _(behave: Behave) -> str:
    return scheduled(Corridor("a", 1), RewardSum([WeightedReward("mine", 1.0, lambda episode: behave())]))


@part("reward function with `concurrency`")
def _(behave: Behave) -> str:
    def mine(episode: Any) -> Any:
        return behave()

    mine.concurrency = 4  # type: ignore[attr-defined]
    return scheduled(Corridor("a", 1), RewardSum([WeightedReward("mine", 1.0, mine)]))


@part("reward function: the reward of its verdict")
def _(behave: Behave) -> str:
    mine = WeightedReward("mine", 1.0, lambda episode: Verdict(behave(), "why"))
    return scheduled(Corridor("a", 1), RewardSum([mine]))


STATE = TurnState("trace", 0, ASKED, LEFT)


@part("verifier")
def _(behave: Behave) -> str:
    return of_verdicts([UserVerifier("mine", lambda state, action: behave()).judge(STATE, LEFT)])


@part("verifier: `judge_all`")
def _(behave: Behave) -> str:
    one: Any = lambda state, action: behave()  # noqa: E731
    many = UserVerifier("mine", one, together=lambda pairs, seed: behave())
    return of_verdicts(many.judge_all([(STATE, LEFT)]))


@part("verifier: `then`")
def _(behave: Behave) -> str:
    from turntree.verify.user import build_verifier

    with modules(foreign_then={"judge": lambda state, action: behave()}):
        return of_verdicts([build_verifier(Part("foreign_then:judge")).judge(STATE, LEFT)])


@part("verifier of a package: it raises")
def _(behave: Behave) -> str:
    """Not wrapped: what it gives is a verdict."""
    from turntree.rollout.local import judge_turn

    own: Any = SimpleNamespace(name="own", judge=lambda *_: Verdict(None, f"gave {behave()}"))
    return of_verdicts([judge_turn(own, STATE, LEFT)])


def _judge(behave: Behave, content: bool) -> str:
    from turntree.rollout.local import judge_turn
    from turntree.verify.judge import LlmJudge

    judge = LlmJudge(url="http://127.0.0.1:1/v1", model="m")

    def create(**_: Any) -> Any:
        given = behave()
        if not content:
            return given
        message = SimpleNamespace(content=given, tool_calls=None)
        return SimpleNamespace(usage=None, choices=[SimpleNamespace(finish_reason="stop", message=message)])

    judge.client = SimpleNamespace(  # type: ignore[assignment]
        chat=SimpleNamespace(completions=SimpleNamespace(create=create)), close=lambda: None
    )
    try:
        return of_verdicts([judge_turn(judge, STATE, Message("assistant", "right"))])
    finally:
        judge.close()


@part("judge: its server's answer")
def _(behave: Behave) -> str:
    return _judge(behave, content=False)


@part("judge: the text in it")
def _(behave: Behave) -> str:
    return _judge(behave, content=True)


@part("verifier `executed`: its environment")
def _(behave: Behave) -> str:
    from turntree.env.tasks import environment_record
    from turntree.rollout.executed import Executed

    class Turns(Plain):
        def step(self, action: Message) -> Observation:
            return behave() if action.content == "right" else super().step(action)

    with modules(foreign_game={"tasks": lambda split, count, *, seed: [Turns(behave)]}):
        named = Part("foreign_game:tasks")
        record = environment_record(named, "train", 1, 0, "plain")
        history = Turns(behave).reset()
        state = TurnState("trace", 0, history, LEFT, environment=record)
        return of_verdicts([Executed(named).judge(state, Message("assistant", "right"))])


@part("teacher")
def _(behave: Behave) -> str:
    from turntree.rollout.teachers import _said

    said = _said(lambda *_: behave(), Corridor(), ASKED)
    return "a label" if isinstance(said, Message) else CENSORED  # `labelled` counts it, with what was given


# engine and renderer


@part("engine: `poll`")
def _(behave: Behave) -> str:
    class Polls(ScriptedEngine):
        def poll(self, timeout: float | None = None) -> Any:
            return behave()

    engine = Polls(lambda prompt, seed: WORDS[0], RENDERER.stop_ids, vocab_size=4096)
    return scheduled(Corridor("a", 1), engine=engine)


@part("engine: a token id")
def _(behave: Behave) -> str:
    class Tokens(ScriptedEngine):
        def poll(self, timeout: float | None = None) -> Any:
            return [self._odd(one) for one in super().poll(timeout)]

        def _odd(self, one: Finished) -> Finished:
            numbers = {"token_ids": (behave(),), "logprobs": (0.0,), "entropies": (0.0,)}
            return Finished(ticket=one.ticket, completion=Completion(**numbers, finish="stop"))

    engine = Tokens(lambda prompt, seed: WORDS[0], RENDERER.stop_ids, vocab_size=4096)
    return scheduled(Corridor("a", 1), engine=engine)


def _renderer(place: str) -> Callable[[Behave], str]:
    def play(behave: Behave) -> str:
        class Renders(ChatRenderer):
            rendered = False

            def prompt(self, *arguments: Any, **more: Any) -> Any:
                first, Renders.rendered = not Renders.rendered, True
                return behave() if place == "prompt" and not first else super().prompt(*arguments, **more)

            def parse(self, *arguments: Any, **more: Any) -> Any:
                return behave() if place == "parse" else super().parse(*arguments, **more)

            def extend(self, *arguments: Any, **more: Any) -> Any:
                return behave() if place == "extend" else super().extend(*arguments, **more)

        return scheduled(Corridor("a", 2), renderer=Renders(tiny_tokenizer()))

    return play


for _name in ("parse", "extend"):
    part(f"renderer: `{_name}`")(_renderer(_name))


@part("renderer: `prompt`, the first of a run")
def _(behave: Behave) -> str:
    class Renders(ChatRenderer):
        def prompt(self, *arguments: Any, **more: Any) -> Any:
            return behave()

    return scheduled(Corridor("a", 2), renderer=Renders(tiny_tokenizer()))


# deciding


@part("gate")
def _(behave: Behave) -> str:
    found = scheduled(Corridor("a", 2), gate=SimpleNamespace(decide=lambda group: behave()))
    return NOTHING if "rewarded" in found else found


@part("brancher")
def _(behave: Behave) -> str:
    own: Any = SimpleNamespace(
        decide=lambda moment: behave(), expand=lambda group: (), state=dict, restore=lambda state: None
    )
    found = scheduled(Corridor("a", 2), brancher=own)
    return NOTHING if "rewarded" in found else found


@part("filter")
def _(behave: Behave) -> str:
    from turntree.rollout.prompts import first_reason

    group = FinishedGroup(task_id="a", iteration=1, rewards=(0.0, 1.0))
    found = first_reason([SimpleNamespace(drop=lambda group: behave())], lambda one: one.drop(group))  # type: ignore[list-item]
    return NOTHING if found is None else "drops, by this reason"


@part("estimator")
def _(behave: Behave) -> str:
    from turntree.credit.checked import credit_of

    return f"{credit_of(lambda tree, rewards: behave(), RolloutTree('a'), Rewards({}))}"


@part("environment: its module and its tasks")
def _(behave: Behave) -> str:
    from turntree.env.tasks import open_tasks

    class Loader:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, self) if name == "foreign_module" else None  # type: ignore[arg-type]

        def create_module(self, spec: Any) -> Any:
            return None

        def exec_module(self, module: Any) -> None:
            given = behave()
            module.tasks = lambda split, count, *, seed: given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])
        patch.delitem(sys.modules, "foreign_module", raising=False)
        try:
            with open_tasks(Part("foreign_module:tasks"), {"train": 1}) as opened:
                return f"{len(opened.of('train'))} task"
        finally:
            sys.modules.pop("foreign_module", None)


# telling and reading


@part("logger")
def _(behave: Behave) -> str:
    from turntree.run.loggers import _Followers

    followers = object.__new__(_Followers)
    followers._live = {"mine": SimpleNamespace(log=lambda *_: behave(), close=lambda: None)}  # type: ignore[dict-item]
    followers._guarded("mine", lambda: followers._live["mine"].log({}, 1))
    return NOTHING if followers._live else OFF


@part("log format")
def _(behave: Behave) -> str:
    from turntree.logs.read import FunctionOfALine
    from turntree.logs.rows import RowRefused

    try:
        return f"{FunctionOfALine(lambda row: behave()).logged({})}"
    except RowRefused:
        return REFUSED


@part("agent: its last line")
def _(behave: Behave) -> str:
    from turntree.gateway.config import last_words

    try:
        line = json.dumps(behave())
    except BaseException:  # it ends before it says anything
        line = ""
    try:
        found = last_words(line, ())
    except InputError:
        return CENSORED
    return CENSORED if found.reward is None else f"rewarded {found}"


@part("MCP row: `answer`")
def _(behave: Behave) -> str:
    from turntree_interop.mcp import McpTasks

    tasks: Any = McpTasks(argument="server", tasks="rows.jsonl")
    try:
        row = {"prompt": "Why?", "answer": behave()}
    except BaseException:
        return NOT_HERE  # a row raises nothing
    try:
        tasks._task("a", row, runtime(behave), weakref.WeakSet(), "server")
    except InputError:
        return REFUSED
    return "taken"


def played(name: str, fault: str) -> str:
    """What becomes of the part where it ends in this fault. Anything but `TurntreeError` that leaves it is the test's
    to see."""
    if fault == "hangs" and name not in LIMITED:
        return NOT_HERE
    try:
        return PARTS[name](FAULTS[fault])
    except TurntreeError as error:
        assert str(error) and "\n" not in str(error)
        return ENDS
    except (Odd, MemoryError, ConnectionError):
        if name not in DECIDERS:
            raise
        return ENDS  # the command says in one line where it was raised (tests/cli)


DECIDERS = {"engine: `poll`", "engine: a token id", "gate", "brancher", "filter", "estimator"}
_OVER = Observation(ASKED, done=True, success=True)
_JUST: dict[str, Any] = {  # what every part should give
    "environment: `step`": _OVER,
    "environment: `reset`": ASKED,
    "environment: `reward`": 1.0,
    "environment: `success`": True,
    "environment: `done`": False,
    "plain class: `reward`": 1.0,
    "plain class: `success`": True,
    "plain class: `get_reward`": 1.0,
    "plain class: `done`": True,
    "reward function of rows (TRL's)": [1.0],
    "reward function of rows (TRL's): a number in its list": 1.0,
    "tool of a runtime": ToolOutput("pressed"),
    "`gymnasium:` `step`": (0, 1.0, True, False, {}),
    "`gymnasium:` `reward`": 1.0,
    "`gymnasium:` `terminated`": True,
    "`gymnasium:` `truncated`": True,
    "`openenv:` `step`": SimpleNamespace(observation={"text": "on"}, reward=1.0, done=True),
    "`openenv:` `reward`": 1.0,
    "`openenv:` `done`": False,
    "`verifiers:` the rubric's reward": 1.0,
    "`tau2:` an assertion": True,
    "`mcp:` a tool": ToolOutput("pressed"),
    "reward function": 1.0,
    "reward function with `concurrency`": 1.0,
    "reward function: the reward of its verdict": 1.0,
    "verifier": 1.0,
    "verifier: `judge_all`": [1.0],
    "verifier: `then`": 1.0,
    "judge: its server's answer": SimpleNamespace(
        usage=None,
        choices=[
            SimpleNamespace(finish_reason="stop", message=SimpleNamespace(content="VERDICT: SAME", tool_calls=None))
        ],
    ),
    "judge: the text in it": "VERDICT: SAME",
    "environment: its module and its tasks": [Corridor()],
    "verifier `executed`: its environment": _OVER,
    "teacher": LEFT,
    "engine: a token id": WORDS[0][-1],
    "renderer: `parse`": LEFT,
    "renderer: `extend`": (1, 2),
    "renderer: `prompt`, the first of a run": (1, 2),
    "estimator": Credit({}, 0.0, 0.0, True),
    "log format": {"group": "a", "reward": 1.0},
    "agent: its last line": 1.0,
    "MCP row: `answer`": "yes",
}
STANDS_ALONE = {"engine: `poll`", "verifier of a package: it raises"}  # no proper answer is given here


def proper(name: str) -> str:
    """What becomes of the part where it gives what it should."""
    return PARTS[name](lambda: _JUST.get(name))


MARKS = {CENSORED: "c", ENDS: "e", REFUSED: "r", OFF: "off", TOLD: "told", NOT_HERE: "-"}


def table(cells: Mapping[tuple[str, str], str]) -> str:
    """The matrix as it stands in docs/results/reliability.md: parts with the same cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in PARTS:
        rows.setdefault(tuple(MARKS.get(cells[name, fault], cells[name, fault]) for fault in FAULTS), []).append(name)
    head = f"| | {' | '.join(FAULTS)} |\n|---|{'---|' * len(FAULTS)}"
    return "\n".join([head, *(f"| {'; '.join(names)} | {' | '.join(row)} |" for row, names in rows.items())])
