"""prime-rl's train rollouts and the traces of verifiers 0.4, which are message graphs; also their flat rows before.

prime-rl writes `rollouts/step_N/train/all/traces.jsonl` (and what was trained on once more, in `effective`), verifiers
`traces.jsonl`. A line is a trace, or an episode with several of them: `nodes` (a message each, with its `parent`;
`sampled` where the policy made it, with a `mask` over its tokens), `calls` of the model (`node`, `usage`,
`finish_reason`), `rewards` by name (score and weight), `errors` of every attempt, `ok`, `stop_condition`, `task`
(data, key, hash). Older prime-rl wrote `rollouts/step_N/train_rollouts.jsonl`; older rows have example_id, prompt,
completion, reward, is_truncated and error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.logs.generic import Options
from turntree.logs.grouping import grouped, parsed
from turntree.logs.groups import LoggedGroup, LoggedRollout, action_text
from turntree.logs.rows import (
    LoggedRow,
    ReadReport,
    RowRefused,
    count,
    facts_of,
    flag,
    items,
    named_prompt,
    number,
    parse_row,
    reward,
    step_of,
    text,
    text_within,
)
from turntree.traces.formats.row import part_of

Row = dict[str, Any]
_FLAT = frozenset({"example_id", "completion", "prompt", "reward"})
_GRAPH = frozenset({"nodes", "rewards", "task"})
_EPISODE = frozenset({"traces", "task", "env"})
_LIMITS = frozenset({
    "max_turns", "max_turns_reached", "prompt_too_long", "context_length", "max_input_tokens", "max_output_tokens",
    "max_total_tokens",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrimeRL(Options):
    """Rollouts of one group id, or else of one task in one step, are a group: a group with an id may end in a later
    step than it began, and has the first one. A rollout that ended in an error has no reward."""

    marks: ClassVar = (_GRAPH, _EPISODE, _FLAT, _FLAT | {"advantage"})  # with it they hold what TRL's rows hold
    folders: ClassVar = tuple(
        f"{above}{one}"
        for above in ("", "rollouts/")
        for one in ("step_*/train/all/traces.jsonl", "step_*/train_rollouts.jsonl")
    )

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        yield from grouped(self._rows(paths, report), paths[0].parent, report)

    def _rows(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedRow]:
        begun: dict[str, int] = {}
        for number_of, path in enumerate(paths):
            step = step_of(path)
            step = number_of if step is None else step
            for line, whole in parsed(path, report):
                try:
                    for one in _traces(whole):
                        row = self._of_graph(one, step) if "nodes" in one else self._flat(one, step)
                        # a group without an id is called as its task, which comes again in other steps
                        at = begun.setdefault(row.group, row.iteration or 0) if row.group != row.task else row.iteration
                        yield replace(row, iteration=at)
                except RowRefused as refused:
                    report.drop(refused.reason, path, line, detail=refused.detail)
                except (InputError, RecursionError) as error:
                    report.drop("a message that cannot be read", path, line, detail=str(error))

    def _of_graph(self, row: Row, step: int) -> LoggedRow:
        task, info = part_of(row, "task"), part_of(row, "info")
        data = part_of(task, "data")
        key = text(task, "key", "hash") or named_prompt(json.dumps(data, sort_keys=True))
        stamped = part_of(info, "prime_rl")
        failure = _failure(row) or row.get("episode_failure")
        given = None if failure or row.get("is_timeout") else self._reward(row)
        unscored = "not scored" if given is None and row.get("rewards") and not row.get("is_timeout") else None
        stop = failure or unscored or text(row, "stop_condition")
        ended = [call.get("finish_reason") for call in items(row, "calls", dict) if not call.get("error")]
        cut = ended[-1:] == ["length"]  # the token limit ended the last answer
        return LoggedRow(
            group=text(stamped, "group_id") or text(part_of(row, "group"), "id") or key,
            task=key,
            rollout=replace(_turns(row), reward=given, stop=stop, completed=False if stop in _LIMITS or cut else None),
            iteration=count(stamped, "step") if stamped.get("step") is not None else step,
            task_type=text(stamped, "env_name") or text(part_of(row, "env"), "name", "id"),
            facts=facts_of(data, task=data or None, agent=text(part_of(row, "agent"), "name")),
        )

    def _reward(self, row: Row) -> float | None:
        """Scores times weights, of those that `rewards` names or of all; None where one of them was not scored."""
        named: Any = row.get("rewards") or {}
        if not isinstance(named, dict) or not all(isinstance(one, dict | None) for one in cast("Row", named).values()):
            raise RowRefused("field 'rewards' is not {name: {score, weight}}")
        unscored = {"score": None, "weight": 1.0}
        given = [unscored | (named[name] or {}) for name in self.rewards or named if name in named]
        parts = [(number(one, "score"), number(one, "weight")) for one in given]
        values = [score * weight for score, weight in parts if score is not None and weight is not None]
        if not math.isfinite(total := sum(values)):
            raise RowRefused("field 'rewards' is too large")
        return total if values and len(values) == len(given) else None

    def _flat(self, row: Row, step: int) -> LoggedRow:
        prompt = json.dumps(row.get("prompt"), sort_keys=True)
        cut, error = row.get("is_truncated") is True, row.get("error")
        completion = row.get("completion")
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        stop = _name_of(error) if error else ("length" if cut else text(row, "stop_condition"))
        key = text(row, "example_id") or named_prompt(prompt)
        task = f"{text(row, 'task') or ''} {key}".strip()
        return LoggedRow(
            group=text(row, "group_id") or task,
            task=task,
            rollout=replace(
                _said(cast("list[Any]", said) if isinstance(said, list) else []),
                reward=None if error else reward(row, self.rewards or ("reward",)),
                stop=stop,
                completed=False if cut else None,
                tokens=count(part_of(row, "token_usage"), "output_tokens"),
            ),
            iteration=count(row, "step") if row.get("step") is not None else step,
            task_type=text(row, "env_name", "task"),
            facts=facts_of(row, prompt=row.get("prompt"), answer=row.get("answer")),
        )


def _traces(row: Row) -> list[Row]:
    """Of an episode, the traces of the agents that train, with what the episode says of all of them."""
    traces = row.get("traces")
    if not isinstance(traces, list):
        return [row]
    shared = {name: row[name] for name in ("group", "env") if row.get(name) is not None}
    shared |= {"episode_failure": _failure(row)}
    found = [cast("Row", one) for one in traces if isinstance(one, dict)]
    trained = [one for one in found if part_of(one, "agent").get("trainable") is not False]
    if not trained:
        raise RowRefused("an episode without a trace of the policy")
    return [shared | one for one in trained]


def _failure(row: Row) -> str | None:
    """Why a trace or an episode failed; errors of attempts before one that succeeded are no failure."""
    ok = flag(row, "ok")
    errors = [] if ok else items(row, "errors", dict)
    return (text(errors[-1], "type") or "an error") if errors else "an error" if ok is False else None


def _turns(row: Row) -> LoggedRollout:
    """The sampled messages of a graph in their order, whatever branch they lie on, with the tokens of each where all
    are known."""
    nodes: list[Row] = items(row, "nodes", dict)
    found = _said([node.get("message") for node in nodes], [bool(node.get("sampled")) for node in nodes])
    used = {call.get("node"): count(part_of(call, "usage"), "completion_tokens") for call in items(row, "calls", dict)}
    counts = [
        sum(one is True for one in items(node, "mask")) or used.get(place)  # no mask without the tokens themselves
        for place, node in enumerate(nodes)
        if node.get("sampled")
    ]
    known = tuple(one for one in counts if one is not None)
    return replace(found, turn_tokens=known if known and len(known) == len(counts) else None)


def _said(messages: Sequence[Any], sampled: Sequence[bool] | None = None) -> LoggedRollout:
    """The turns of a rollout, of those `sampled` or of the assistant, and what was seen before each."""
    actions: list[str] = []
    observations: list[str] = []
    seen: list[str] = []
    for place, raw in enumerate(messages):
        if not isinstance(raw, dict):
            raise RowRefused("a message is not an object")
        message = cast("Row", raw)
        by_policy = message.get("role") == "assistant" if sampled is None else sampled[place]
        if by_policy:
            actions.append(action_text(Message.from_chat(_chat(message))))
            observations.append("\n".join(seen))
            seen = []
        else:
            seen.append(text_within(message.get("content")))
    characters = sum(map(len, actions))
    return LoggedRollout(actions=tuple(actions), reward=None, observations=tuple(observations), characters=characters)


def _chat(message: Row) -> Row:
    """A message with calls as chat APIs write them: verifiers writes a call flat, or as JSON text."""
    calls: list[Row] = []
    for one in items(message, "tool_calls"):
        call: Any = parse_row(one.encode()) if isinstance(one, str) else one
        if not isinstance(call, dict):
            raise RowRefused("a call is not an object")
        flat = {key: cast("Row", call).get(key) for key in ("name", "arguments")}
        calls.append(cast("Row", call) if "function" in call else {"function": flat})
    said = {"role": "assistant", "content": text_within(message.get("content"))}
    return said | ({"tool_calls": calls} if calls else {})


def _name_of(error: Any) -> str:
    if isinstance(error, dict):
        return text(cast("Row", error), "type", "error") or "an error"
    return str(error).partition("(")[0][:60] or "an error"
