"""`tau2:DOMAIN`: the domains of tau2-bench (retail, airline, telecom, mock) with its own tools, databases and policies.

tau2-bench is installed from its repository (`pip install -e tau2-bench`); the `tau2` of PyPI is another project. The
user is

- "model": tau2's own simulator, a language model with the task's scenario (and the user's tools, in telecom): how the
  benchmark is scored, with `splits=official` and pass^k of `turntree evaluate --samples`. It is asked once for every
  history, so that a rollout that is played again hears the same.
- "scripted": the user tells its whole scenario at once and then agrees to everything, `replies` times.
- "solo": tau2's own mode without a user. The agent gets the task's ticket and the user's tools too, and its first
  message without a call ends the episode. It is the mode of telecom, whose user has a telephone to operate.

The reward is tau2's own, as far as it needs no judge: whatever a task's `reward_basis` names of databases (they end as
the gold actions leave them), assertions, gold actions (each was called) and what was to be communicated. Assertions in
words (NL_ASSERTION) are not judged, and a task that nothing else judges is refused. A fork shares the databases until
one of the two writes.

*Traces.* tau-bench: a list of runs `{task_id, trial, reward, traj}` with chat messages in `traj`. Its few-shot files
hold dialogues as text, `{messages_display}`, in which the calls are lost. tau2: a document `{info, tasks,
simulations}`, or a folder with `results.json` and one file a simulation. Each simulation has `messages` with flat tool
calls. Tool calls of the simulated user are not part of the agent's conversation; they are left out and counted. tau2
files hold no system prompt: it is put together from the domain policy as the benchmark's own agent does.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, is_of_the_machine, reason_of
from turntree.core.messages import Message, ToolCall, answer_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_truth
from turntree.env.adapted import AdaptedEnvironment, named, of_split
from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    ChatRow,
    count_unknown,
    each_object,
    list_of,
    object_of,
    text_of,
    told_by,
    was_cut,
    words,
)
from turntree_interop.observed import calls_in

User = Literal["auto", "scripted", "solo", "model"]
_PROMPT = "You help a customer. Follow the policy, and either call tools or write to the customer.\n\n{policy}"
_SOLO = "You solve a ticket. Follow the policy, call tools, and write one message when it is solved.\n\n{policy}"
_GREETING = "Hi! How can I help you today?"  # with which tau2's agent begins
_MOST_STEPS = 30  # calls of tools by a user between two of its messages
_AGREES = "Yes, please go ahead."
_OVER = "The customer has left."
_READ_ONLY = ("read", "think")  # kinds of tools that change nothing
_JUDGED = frozenset({"DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE"})


def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    user: User = "auto",
    replies: int = 4,
    user_model: str = "",
    user_url: str = "",
    splits: Literal["drawn", "official"] = "drawn",
) -> list[AdaptedEnvironment]:
    """`count` tasks of a split of a domain, drawn by `seed`. Every split has tasks, also of the ten of mock.

    Args:
        user: Who speaks as the user: a model, a script, or nobody (solo), as far as the tasks allow it.
        replies: How often a scripted user agrees to what it is asked.
        user_model: For user=model, as LiteLLM names it: gpt-4.1, or openai/NAME for a server of one's own.
        user_url: The base of that server's API, http://host:8000/v1.
        splits: official: the domain's own train and test (the leaderboard's `base` are both together).
    """
    if (user == "model") != bool(user_model):
        hint = "for example --set environment.user_model=gpt-4.1"
        raise InputError("goes with user=model and only with it", field="environment.user_model", hint=hint)
    name = named(argument, "tau2:DOMAIN")
    source = _module(name)
    solo = user == "solo" or (user == "auto" and name.startswith("telecom"))
    found = {str(task.id): _case(task, solo, replies, user == "model") for task in source.get_tasks()}
    if splits == "official":
        listed = source.get_tasks_split()
        if split not in listed:
            hint = f"it has {', '.join(listed)}; leave the checks out (check.tasks=0), and evaluate on test afterwards"
            raise InputError(f"has no split {split!r}", field="environment.splits", hint=hint)
        chosen = [(None, str(task)) for task in listed[split] if str(task) in found]
        rows = seeds.shuffled(seed, chosen, lambda row: row[1])[:count]
    else:
        rows = of_split(found, split, count, seed=seed, where=argument or "", key=str, closed=True)
    domain = _Domain(source, solo=solo, user=(user_model, user_url))
    return [
        AdaptedEnvironment(
            partial(_Conversation, domain, found[row]),
            task_id=f"{name}/{row}",
            tools=domain.tools,
            task_type=name,
            gold=_gold(found[row]),
        )
        for _, row in rows
    ]


@dataclass(frozen=True)
class _Case:
    """One task: what the user says (or the ticket), and what it is judged by (tau2's `evaluation_criteria`)."""

    id: str
    says: tuple[str, ...]
    solo: bool
    actions: tuple[Any, ...] = ()  # {name, arguments, requestor, compare_args}
    communicate: tuple[str, ...] = ()
    assertions: tuple[Any, ...] = ()
    basis: frozenset[str] = frozenset()
    start: Any = None  # tau2's `initial_state`
    scenario: str = ""  # of a model that plays the user
    user_tools: Any = None  # that the user may call (None: all)


def _case(task: Any, solo: bool, replies: int, modelled: bool = False) -> _Case:
    """A task of tau2 with a scripted user, a model, or solo. Raises `InputError` where it has no ticket."""
    due = task.evaluation_criteria
    if solo and not task.ticket:
        raise InputError(f"task {task.id!r} has no ticket", field="environment.user", hint="use user=scripted")
    if not (solo or modelled) and due is not None and any(action.requestor == "user" for action in due.actions or ()):
        hint = "use user=model, or user=solo, where the agent has the user's tools"
        raise InputError(f"the user of task {task.id!r} has tools to use", field="environment.user", hint=hint)
    return _Case(
        id=str(task.id),
        says=(task.ticket,) if solo else (_scenario(task.user_scenario.instructions), *[_AGREES] * replies),
        solo=solo,
        actions=tuple(due.actions or ()) if due else (),
        communicate=tuple(due.communicate_info or ()) if due else (),
        assertions=tuple(due.env_assertions or ()) if due else (),
        basis=_basis(task.id, due.reward_basis if due else ()),
        start=task.initial_state,
        scenario=str(task.user_scenario) if modelled else "",
        user_tools=getattr(task, "user_tools", None),
    )


def _basis(task: Any, named: Any) -> frozenset[str]:
    """What a task is judged by. Raises `InputError` where that is nothing, or something that is not judged: doing
    nothing would earn the whole reward."""
    basis = frozenset(str(getattr(part, "value", part)) for part in named)
    unknown = basis - _JUDGED - {"NL_ASSERTION"}
    if unknown or not basis & _JUDGED:
        said = ", ".join(sorted(unknown or basis)) or "nothing"
        hint = f"take it out of the tasks, or give it a reward_basis with one of {', '.join(sorted(_JUDGED))}"
        problem = f"task {str(task)!r} has the reward basis {said}, which is not judged"
        raise InputError(problem, field="reward_basis", hint=hint)
    return basis


def _scenario(told: Any) -> str:
    """The user's whole scenario, in the words of the task (which speak to the user)."""
    names = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
    parts = [told] if isinstance(told, str) else [getattr(told, name, None) for name in names]
    return "This is all that I was asked to tell you:\n" + "\n".join(part for part in parts if part)


def _facts(message: Any) -> list[str]:
    """What of a message of tau2 says something: neither times nor costs."""
    several = getattr(message, "tool_messages", None)
    if several is not None:
        return [fact for one in several for fact in _facts(one)]
    calls = getattr(message, "tool_calls", None) or ()
    return [str(message.role), str(message.content), *(f"{call.name} {call.arguments}" for call in calls)]


class _Domain:
    """A domain's databases as every task of it begins, loaded once, and what its gold actions lead to."""

    def __init__(self, source: Any, *, solo: bool, user: tuple[str, str] = ("", "")) -> None:
        self._user, self._said = user, dict[str, Any]()  # a model's answers by what it had heard
        make = getattr(source, "get_environment", None) or source.get_environment_manual_policy
        self._fresh = make(solo_mode=True) if solo else make()
        self.policy = str(self._fresh.get_policy())
        held = [self._fresh.get_tools(), *([self._fresh.get_user_tools()] if solo and self._fresh.user_tools else [])]
        self.tools = tuple(tool.openai_schema for kind in held for tool in kind)
        self._ends: dict[str, Any] = {}
        self._untouched: Any = None

    def begin(self, case: _Case) -> Any:
        """tau2's environment at the start of a task; shared, where the task changes nothing at its start."""
        if case.start is None:
            return self._fresh
        made = copy.deepcopy(self._fresh)
        start = case.start
        made.set_state(start.initialization_data, start.initialization_actions, start.message_history or [])
        return made

    def simulator(self, case: _Case) -> Any:
        """tau2's user of a task, a language model; None where none plays."""
        model, url = self._user
        if not model:
            return None
        made = importlib.import_module("tau2.user.user_simulator").UserSimulator
        kit = self._fresh.user_tools
        tools = None if kit is None else self._fresh.get_user_tools(include=case.user_tools) or None
        server = {"api_base": url} if url else {}
        return made(tools=tools, instructions=case.scenario, llm=model, llm_args={"temperature": 0.0, **server})

    def answered(self, user: Any, case: _Case, heard: Any, state: Any) -> tuple[Any, Any]:
        """What a model says as the user, asked once for every history of the task."""
        told = [_facts(message) for message in (*state.messages, heard)]
        key = json.dumps([case.id, told])
        if key not in self._said:
            try:
                answer, state = user.generate_next_message(heard, state)
            except BaseException as error:
                raise EnvironmentFault(f"the user's model failed: {reason_of(error)}") from error
            self._said[key] = (copy.deepcopy(answer), copy.deepcopy(state))
        answer, state = self._said[key]
        return copy.deepcopy(answer), copy.deepcopy(state)

    def end(self, case: _Case) -> Any:
        """The databases after the gold actions (a look-up among them may fail, as in tau2)."""
        if case.id not in self._ends:
            gold = copy.deepcopy(self.begin(case))
            for action in case.actions:
                try:
                    gold.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
                except Exception as error:
                    if is_of_the_machine(error):
                        raise
            self._ends[case.id] = self.databases(gold)
        return self._ends[case.id]

    def databases(self, environment: Any) -> Any:
        """What two databases are compared by: tau2's hashes, which take a quarter of a second."""
        if environment is not self._fresh:
            return environment.get_db_hash(), environment.get_user_db_hash()
        if self._untouched is None:
            self._untouched = environment.get_db_hash(), environment.get_user_db_hash()
        return self._untouched


@dataclass
class _Conversation:
    """One episode (`env.adapted.Game`)."""

    domain: _Domain
    case: _Case
    environment: Any = None
    shared: bool = True  # whether another episode has these databases too
    heard: int = 1  # messages of the user so far
    said: list[str] = field(default_factory=list[str])
    made: list[ToolCall] = field(default_factory=list[ToolCall])
    user: Any = None  # tau2's simulator, and its state
    state: Any = None

    def begin(self) -> tuple[Message, ...]:
        self.environment = self.domain.begin(self.case)
        self.user = self.domain.simulator(self.case)
        if self.user is not None:
            self.state = self.user.get_init_state()
            told, _ = self._user_says(_GREETING)
            system = Message("system", _AGENT_PROMPT.format(policy=self.domain.policy))
            return system, Message("assistant", _GREETING), Message("user", told)
        prompt = (_SOLO if self.case.solo else _PROMPT).format(policy=self.domain.policy)
        return Message("system", prompt), Message("user", self.case.says[0])

    def act(self, action: Message) -> Observation:
        if text := answer_text(action):  # what was only thought was not communicated
            self.said.append(text)
        if action.tool_calls:
            self.made += action.tool_calls
            return Observation(tuple(self._call(call) for call in action.tool_calls), done=False, reward=0.0)
        if self.user is not None:
            told, over = self._user_says(action.content)
            if not over:
                return Observation((Message("user", told),), done=False, reward=0.0)
        elif self.heard < len(self.case.says):
            self.heard += 1
            return Observation((Message("user", self.case.says[self.heard - 1]),), done=False, reward=0.0)
        solved = self._solved()
        return Observation((Message("user", _OVER),), done=True, success=solved, reward=float(solved))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Conversation:
        """A fork: it shares the databases until one of the two writes."""
        self.shared = True
        held = self.domain, self.case, self.environment, True, self.heard
        return _Conversation(*held, list(self.said), list(self.made), self.user, copy.deepcopy(self.state))

    def _user_says(self, text: str) -> tuple[str, bool]:
        """What the model that plays the user says to the agent's words, after the calls that it makes of its own tools,
        and whether that ends the conversation."""
        kinds = importlib.import_module("tau2.data_model.message")
        heard = kinds.AssistantMessage(role="assistant", content=text)
        for _ in range(_MOST_STEPS):
            said, self.state = self.domain.answered(self.user, self.case, heard, self.state)
            if not said.is_tool_call():
                return str(said.content), bool(self.user.is_stop(said))
            if self.shared:
                self.environment, self.shared = copy.deepcopy(self.environment), False
            results = [self.environment.get_response(call) for call in said.tool_calls]
            heard = results[0] if len(results) == 1 else kinds.MultiToolMessage(role="tool", tool_messages=results)
        raise EnvironmentFault("the user's model calls tools without end")

    def _call(self, call: ToolCall) -> Message:
        kits = (self.environment.tools, self.environment.user_tools if self.case.solo else None)
        kind = next((kit for kit in kits if kit is not None and kit.has_tool(call.name)), None)
        if kind is None:
            return self._told(call, f"Error: Tool '{call.name}' not found.")
        if self.shared and str(kind.tool_type(call.name).value) not in _READ_ONLY:
            self.environment, self.shared = copy.deepcopy(self.environment), False
        try:
            answer = self.environment.make_tool_call(call.name, requestor="assistant", **call.arguments)
            self.environment.sync_tools()
        except BaseException as error:  # tau2 shows the exceptions of its tools to the agent
            reason = reason_of(error)
            if is_of_the_machine(error):
                raise EnvironmentFault(f"tool {call.name!r} failed: {reason}") from error
            return self._told(call, f"Error: {error}")
        return self._told(call, self.environment.to_json_str(answer))

    def _told(self, call: ToolCall, text: Any) -> Message:
        return Message("tool", str(text), tool_call_id=call.id, name=call.name)

    def _solved(self) -> bool:
        case, said = self.case, [text.lower().replace(",", "") for text in self.said]
        if "DB" in case.basis and self.domain.databases(self.environment) != self.domain.end(case):
            return False
        if "ENV_ASSERTION" in case.basis:
            judged = copy.deepcopy(self.environment)
            met = [judged.run_env_assertion(due, raise_assertion_error=False) for due in case.assertions]
            if not all(given_truth("assertion", one) for one in met):
                return False
        if "ACTION" in case.basis and not all(any(_is_made(due, call) for call in self.made) for due in case.actions):
            return False
        return "COMMUNICATE" not in case.basis or all(
            any(info.lower() in text for text in said) for info in case.communicate
        )


def _is_made(due: Any, call: ToolCall) -> bool:
    """Whether a call is a gold action, by tau2's rule (`Action.compare_with_tool_call`): it looks neither at who called
    nor at the answer, and without `compare_args` at the arguments that the call has."""
    compared = call.arguments if due.compare_args is None else due.compare_args
    wanted, found = ({key: held[key] for key in held if key in compared} for held in (due.arguments, call.arguments))
    return due.name == call.name and wanted == found


def _gold(case: _Case) -> tuple[Message, ...]:
    """The recorded gold actions as an expert would call them, what is to be said, and silence to the end."""
    calls = [
        Message("assistant", "", (ToolCall(action.name, dict(action.arguments), f"call_{number}"),))
        for number, action in enumerate(case.actions, start=1)
    ]
    told = Message("assistant", " ".join(("It is done.", *case.communicate)))
    return (*calls, told, *[Message("assistant", "Is there anything else?")] * (len(case.says) - 1))


def _module(domain: str) -> Any:
    """The module of a domain. Raises `InputError` where tau2-bench is not installed."""
    hint = "install tau2-bench from its repository (the `tau2` of PyPI is another project), and set TAU2_DATA_DIR"
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("loguru").logger.disable("tau2")
    try:
        importlib.import_module("tau2.domains")
    except ModuleNotFoundError as error:
        own = (error.name or "").partition(".")[0] == "tau2"
        problem = "tau2-bench is not installed" if own else f"tau2-bench needs {error.name!r}, which is not installed"
        raise InputError(problem, field="environment", hint=hint) from error
    try:
        return importlib.import_module(f"tau2.domains.{domain.partition('-')[0]}.environment")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        problem = f"tau2-bench has no domain {domain!r} here ({error})"
        raise InputError(problem, field="environment", hint=hint) from error


Prompt = Literal["agent", "policy"]
# The prompt of tau2's `llm_agent` (sierra-research/tau2-bench, MIT): what the recorded agent was told.
_AGENT_PROMPT = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>"""
_SPEAKER = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
_FAULTS = words("infrastructure_error user_error unexpected_error")  # tau2 writes a reward of 0 for them, too
_RUN_KEYS = words("task_id trial reward info traj")
_SIMULATION_KEYS = words(
    "id task_id trial messages reward_info environment_info termination_reason timestamp start_time end_time duration "
    "agent_cost user_cost seed mode info ticks policy"
)
_CALL_KEYS = words("id name arguments requestor type function")
_MESSAGE_KEYS = words(
    "role content tool_calls id requestor error turn_idx timestamp cost usage raw_data tool_messages is_audio "
    "audio_format audio_path audio_content generation_time_seconds"
)


def _why_not(row: dict[str, Any]) -> str:
    if isinstance(row.get("traj"), list) or isinstance(row.get("messages_display"), str):
        return ""
    known = "messages" in row and ("reward_info" in row or "environment_info" in row)
    return "" if known else "neither 'traj' nor 'messages' beside 'reward_info'"


@told_by(_why_not)
def read_tau_row(row: dict[str, Any], *, system_prompt: Prompt = "agent") -> ChatRow:
    """A run of tau-bench or a simulation of tau2, with the `environment_info` of its document where that has one.

    Args:
        system_prompt: That of tau2's agent, or the "policy" alone.
    """
    if "messages_display" in row:
        return _read_display(row)
    return _read_run(row) if "traj" in row else _read_simulation(row, object_of(row, "environment_info"), system_prompt)


def _read_run(row: dict[str, Any]) -> ChatRow:
    chat = ChatRow.of(row, _RUN_KEYS, group="task_id", meta="task_id trial", told=row)
    chat.messages = list_of(row, "traj", "a list of chat messages")
    return chat


def _read_display(row: dict[str, Any]) -> ChatRow:
    """The trace ends before the first turn whose call was not recorded ("assistant: None"), because later histories
    would be wrong."""
    chat = ChatRow(meta={"trajectory": "text"})
    _, *spoken = _SPEAKER.split(str(row["messages_display"]))
    lost = False
    for role, content in zip(spoken[::2], spoken[1::2], strict=True):
        message = {"role": role, "content": content.removesuffix("\n")}
        lost = lost or (role == "assistant" and message["content"] == "None")
        chat.messages.append(message | ({SKIP: "call_not_recorded"} if lost and role == "assistant" else {}))
    return chat


def _read_simulation(row: dict[str, Any], info: dict[str, Any], system_prompt: Prompt) -> ChatRow:
    meta, told = "task_id trial termination_reason", {"reward": object_of(row, "reward_info").get("reward")}
    chat = ChatRow.of(row, _SIMULATION_KEYS, id="id", group="task_id", meta=meta, told=told)
    chat.domain = text_of(info, ("domain_name",)) or ""
    chat.declare(info, "tool_defs")
    messages = list_of(row, "messages", "a list of tau2 messages")
    chat.messages = each_object(messages, lambda raw: _messages(raw, chat))
    policy = info.get("policy") or row.get("policy")
    if policy and not any(isinstance(m, dict) and m.get("role") == "system" for m in chat.messages):
        plain = system_prompt == "policy" or info.get("agent", "llm_agent") != "llm_agent"
        content = policy if plain else _AGENT_PROMPT.format(policy=policy)
        chat.messages.insert(0, {"role": "system", "content": content})
    if row.get("termination_reason") in _FAULTS:
        chat.drop_turns()
    return chat


def _messages(row: dict[str, Any], chat: ChatRow) -> list[Any]:
    """One message, none for what the simulated user did alone, several for the results of parallel calls."""
    count_unknown(row, _MESSAGE_KEYS, "messages[].", chat.ignored)
    message: dict[str, Any] = {"role": row.get("role"), "content": row.get("content")}
    if row.get("role") == "assistant" and was_cut(row.get("raw_data")):
        message["weight"] = 0
    if isinstance(row.get("tool_messages"), list):
        return each_object(row["tool_messages"], lambda one: _messages(one, chat))
    if row.get("role") == "tool":
        if row.get("requestor") == "user":
            chat.ignored["messages[] of tools used by the simulated user"] += 1
            return []
        failed = {FAILED: row["error"]} if row.get("error") is not None else {}
        return [{**message, "tool_call_id": row.get("id"), **failed}]
    if row.get("role") == "user" and row.get("tool_calls"):
        chat.ignored["messages[].tool_calls of the simulated user"] += 1
        return [message] if row.get("content") else []
    if row.get("tool_calls"):
        message["tool_calls"] = calls_in(row["tool_calls"], _CALL_KEYS, "tool_calls[].", chat.ignored)
    return [message]
