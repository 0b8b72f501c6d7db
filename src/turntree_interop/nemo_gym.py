"""NeMo Gym: pivot rows as its single-step servers read them, its rollout logs, and NVIDIA's comparison of actions.

Logs (`ng_collect_rollouts`, one file a collection, in order of completion): `responses_create_params.input` (the
prompt), `response.output` (OpenAI Responses items), `response.usage`, `reward`, `_ng_task_index`, `_ng_rollout_index`;
`mask_sample` where an agent says that its reward must not be trained on, `_ng_failure_class` in the sidecar of
failures.

The verifier `nemo`: the rewards of NVIDIA's released NeMo-Gym servers, flaws included, so that numbers can be
compared.

Behaviour of NeMo-Gym 07d6b0d (August 2026): `single_step_tool_use_with_argument_comparison` (domains tau2,
function_calling, search, swe, droid) and the string rule of `terminus_judge` (domain terminal), written after what
these servers do. To train, use `recommended`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from turntree.core.errors import ConfigError
from turntree.core.messages import THOUGHT, Message, ToolCall, action_kind
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.logs.generic import Options
from turntree.logs.grouping import grouped, parsed, read_each
from turntree.logs.groups import LoggedGroup, LoggedRollout, call_text
from turntree.logs.rows import (
    LoggedRow,
    ReadReport,
    RowRefused,
    count,
    facts_of,
    named_prompt,
    reward,
    text,
    text_within,
)
from turntree.run.jsonl import write_lines
from turntree.traces.formats.row import part_of, was_cut
from turntree.verify.matching import most_pairs
from turntree.verify.texts import terminus_in
from turntree_interop.rows import columns

if TYPE_CHECKING:
    from turntree.stages.export import Bundle, ExportedPivot

AGENT = "single_step_tool_use_with_argument_comparison_agent"
BATCH = "function_call_batch"  # the type of several calls at once


def export_nemo_gym(bundle: Bundle, out: Path, *, agent: str = AGENT) -> dict[str, Any]:
    """Write `pivots.jsonl`. The reward is NVIDIA's comparison, which our verifier `nemo` reproduces; `pass_rate` is
    that of the verifier of the profile.

    Args:
        agent: The agent of NeMo Gym whose resources server judges.
    """
    write_lines(out / "pivots.jsonl", (_row(pivot, agent) for pivot in bundle.pivots))
    notes: list[str] = []
    if bundle.verifier.name != "nemo":
        notes.append(f"NeMo Gym judges with the server of {agent!r}; pass_rate is under {bundle.profiled!r}")
    if several := sum(len(pivot.state.demonstration.tool_calls) > 1 for pivot in bundle.pivots):
        notes.append(f"{several} pivots make several calls at once ({BATCH}), which NeMo Gym 0.4.0 and older refuse")
    return {"files": ["pivots.jsonl"], "notes": notes}


def _row(pivot: ExportedPivot, agent: str) -> dict[str, Any]:
    request: dict[str, Any] = {"input": [item for message in pivot.state.history for item in _items(message)]}
    if pivot.state.tools:
        request |= {"tools": [_tool(tool) for tool in pivot.state.tools], "parallel_tool_calls": True}
    told = columns(pivot)
    return {
        "responses_create_params": request,
        "expected_action": _expected(pivot.state.demonstration),
        "trajectory_id": told.pop("trace_id"),
        "instance_id": pivot.group,  # so that pivots of one task stay in one split
        "pass_rate": told.pop("pass_rate"),
        "meta_info": told,
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }


def _items(message: Message) -> list[dict[str, Any]]:
    """A chat message as Responses items."""
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.content}]
    said = [{"type": "message", "role": message.role, "content": message.content}]
    thought = [{"type": "summary_text", "text": message.reasoning}]
    reasoning = [{"type": "reasoning", "id": "", "summary": thought}] if message.reasoning else []
    calls = [{**_call(call), "call_id": call.id or ""} for call in message.tool_calls]
    return [*reasoning, *(said if message.content or not calls else []), *calls]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}


def _expected(message: Message) -> dict[str, Any]:
    calls = [_call(call) for call in message.tool_calls]
    if not calls:
        return {"type": "message", "content": message.content}
    return calls[0] if len(calls) == 1 else {"type": BATCH, "calls": calls}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        "strict": function.get("strict", False),
    }


@dataclass(frozen=True, kw_only=True)
class NemoGym(Options):
    """Rollouts of NeMo Gym. A file is an iteration, together with the failures that lie beside it (NAME_failures)."""

    marks: ClassVar = (frozenset({"response", "reward"}),)
    beside: ClassVar = ("*_materialized_inputs.jsonl", "rollout_verdicts.jsonl")
    rewards: tuple[str, ...] = ("reward",)

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        collections: dict[Path, list[Path]] = {}
        for path in paths:
            collections.setdefault(path.with_name(path.name.replace("_failures.jsonl", ".jsonl")), []).append(path)
        for number, (name, files) in enumerate(collections.items()):
            read = partial(_nemo_row, rewards=self.rewards, iteration=number)
            rows = (row for path in files for row in read_each(read, parsed(path, report), path, report))
            yield from grouped(rows, name, report)


def _nemo_row(row: dict[str, Any], *, rewards: tuple[str, ...], iteration: int) -> LoggedRow:
    """A group are the rollouts of one task index in one file; without an index, of one instance, else of one prompt. An
    index that begins again stands for other tasks, or for another collection where its rollouts have the same numbers.
    Masked and failed rollouts are censored, whatever reward they carry. Raises `RowRefused` where nothing says which
    rollouts belong together."""
    masked = row.get("mask_sample") or part_of(row, "instance_config").get("mask_sample")
    response = part_of(row, "response")
    failed = response.get("status") == "failed"
    stop = text(row, "_ng_failure_class") or ("masked" if masked else "failed" if failed else None)
    items = [] if stop and row.get("response") is None else response.get("output")  # a failure may have none
    if not isinstance(items, list):
        raise RowRefused("no list in field 'response.output'")
    index, task, asked = text(row, "_ng_task_index"), text(row, "instance_id"), _asked(row)
    group = task or _prompt_name(asked["prompt"]) if index is None else f"task {index}"
    if group is None:
        raise RowRefused("no task index, instance or prompt: its group is not known")
    actions, observations = _turns(_flat(cast("list[Any]", items)))
    return LoggedRow(
        group=group,
        task=task,
        rollout=LoggedRollout(
            actions=actions,
            reward=None if stop else reward(row, rewards),
            observations=observations,
            tokens=count(part_of(response, "usage"), "output_tokens") or None,  # some write 0 for what is not counted
            characters=sum(map(len, actions)),
            stop=stop,
            completed=False if was_cut(response) else None,
        ),
        iteration=iteration,
        facts=facts_of(row, uuid=row.get("uuid"), task=row.get("task"), **asked),
        sample=count(row, "_ng_rollout_index"),
    )


def _asked(row: dict[str, Any]) -> dict[str, Any]:
    """The prompt and what is said of it. Where a row names its task, a simulated user may speak in the prompt, other
    words in every rollout: then it goes as far as the policy's first."""
    asked = part_of(row, "responses_create_params")
    prompt: Any = asked.get("input")
    if row.get("task") is not None and isinstance(prompt, list):
        prompt = list(takewhile(lambda item: not _is_by_model(item), _flat(cast("list[Any]", prompt))))
    return {"prompt": prompt or None, "metadata": asked.get("metadata")}


def _prompt_name(prompt: Any) -> str | None:
    """None for a prompt without a word: an agent that makes its own prompt logs an empty one for every task."""
    said = [_words(item) for item in _flat(prompt)] if isinstance(prompt, list) else [str(prompt or "")]
    return named_prompt(json.dumps(prompt, sort_keys=True)) if any(words.strip() for words in said) else None


def _flat(items: list[Any]) -> list[dict[str, Any]]:
    """The items in order, those of lists inside the list too. Raises `RowRefused` for what is not an item."""
    found: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, list):
            found += _flat(cast("list[Any]", item))
        elif isinstance(item, dict):
            found.append(cast("dict[str, Any]", item))
        else:
            raise RowRefused("an item of the prompt or the output is not an object")
    return found


def _turns(items: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A turn is a run of items by the model (words, reasoning, calls); what lies between two is observed."""
    actions, observations, seen = [], [], ""
    for by_model, run in groupby(items, key=_is_by_model):
        if by_model:
            actions.append(_action(list(run)))
            observations.append(seen)
        else:
            seen = "\n".join(_words(item) for item in run)
    return tuple(actions), tuple(observations)


def _is_by_model(item: dict[str, Any]) -> bool:
    kind = item.get("type") or "message"
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _action(items: list[dict[str, Any]]) -> str:
    """The calls of a turn, or its text where it calls nothing (reasoning alone is not an action: an empty text)."""
    calls = [_call_text(item) for item in items if item.get("type") == "function_call"]
    said = [_words(item) for item in items if (item.get("type") or "message") == "message"]
    return "\n".join(calls or said)


def _call_text(item: dict[str, Any]) -> str:
    """Raises `RowRefused` for a call whose arguments stand elsewhere: it would read as one without any."""
    if not isinstance(name := item.get("name"), str) or not isinstance(item.get("arguments"), str | dict):
        raise RowRefused("a call without 'name' or 'arguments' in field 'response.output'")
    return call_text(name, item["arguments"])


def _words(item: dict[str, Any]) -> str:
    return text_within(item.get("output") if item.get("type") == "function_call_output" else item.get("content"))


Domain = Literal["tau2", "function_calling", "search", "swe", "droid", "terminal"]
_SIMILARITY: Mapping[Domain, float] = {
    "tau2": 0.1, "function_calling": 0.1, "search": 0.3, "swe": 0.0, "droid": 0.0, "terminal": 0.9
}  # fmt: skip
_FLOAT = 1e-6


class Nemo(TurnVerifier):
    """NVIDIA's comparison of calls.

    Args:
        domain: The server whose rules and threshold apply.
        similarity: In place of its threshold.
    """

    def __init__(self, *, domain: Domain = "tau2", similarity: float | None = None) -> None:
        if domain not in _SIMILARITY:
            raise ConfigError(f"is {domain!r}", field="domain", hint=f"use one of {', '.join(_SIMILARITY)}")
        self._domain = domain
        self._similarity = _SIMILARITY[domain] if similarity is None else similarity

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"nemo/1+domain={self._domain}+similarity={self._similarity:g}"

    def judge(self, state: TurnState, action: Message) -> Verdict:
        shown = state.demonstration
        if self._domain == "terminal":
            reward, reason = self._terminal(shown.content, action.content)
        else:
            reward, reason = self._single_step(shown, action)
        return Verdict(reward, reason, action_kind(action))

    # single_step_tool_use_with_argument_comparison; calls beside the demonstrated ones cost nothing, as released

    def _single_step(self, shown: Message, action: Message) -> tuple[float, str]:
        if not shown.tool_calls:
            return (0.0, "a call instead of a message") if action.tool_calls else (1.0, "a message")
        if not action.tool_calls:
            return 0.0, "a message instead of a call"
        wanted = len(shown.tool_calls)
        pairs = most_pairs(
            shown.tool_calls,
            action.tool_calls,
            lambda one, two: one.name == two.name and self._same(one.arguments, two.arguments),
        )
        return (1.0, "the calls") if pairs == wanted else (0.0, f"{pairs} of {wanted} calls")

    def _same(self, shown: Any, tried: Any) -> bool:
        if not isinstance(tried, type(shown)):
            return False
        if isinstance(shown, dict):
            row, other = cast("dict[str, Any]", shown), cast("dict[str, Any]", tried)
            return row.keys() == other.keys() and all(self._same(value, other[key]) for key, value in row.items())
        if isinstance(shown, list):
            one, two = cast("list[Any]", shown), cast("list[Any]", tried)
            return len(one) == len(two) and all(self._same(a, b) for a, b in zip(one, two, strict=True))
        if isinstance(shown, float):
            return abs(tried - shown) < _FLOAT
        if isinstance(shown, str):
            return self._alike(shown, tried)
        return shown == tried

    def _alike(self, shown: str, tried: str) -> bool:
        """Common words over the words of both, so that equal texts reach 0.5; single words must be equal."""
        words = [Counter(text.strip().lower().split()) for text in (shown, tried)]
        totals = [bag.total() for bag in words]
        if min(totals) < 2:
            return shown == tried
        return (words[0] & words[1]).total() / sum(totals) >= self._similarity

    # terminus_judge, without the judge

    def _terminal(self, shown: str, tried: str) -> tuple[float, str]:
        wanted, found = _terminus(shown), _terminus(tried.rpartition(THOUGHT)[2].strip())
        if wanted is None or found is None or wanted["form"] != found["form"]:
            return 0.0, "not a valid answer of a Terminus agent"
        if wanted["done"] and not found["done"]:
            return 0.0, "does not claim to be done"
        alike = SequenceMatcher(None, wanted["keys"], found["keys"]).ratio()
        if bool(wanted["sent"]) != bool(found["sent"]):
            alike = 0.0
        return float(alike >= self._similarity), f"similarity {alike:.3f}"


def _terminus(text: str) -> dict[str, Any] | None:
    """The answer of either harness; one in a fence is none."""
    return None if text.startswith("```") else terminus_in(text)
