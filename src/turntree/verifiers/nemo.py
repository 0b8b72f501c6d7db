"""The verifier `nemo`: the rewards of NVIDIA's released NeMo-Gym servers, flaws included, so that numbers can be
compared.

Behaviour of NeMo-Gym 07d6b0d (August 2026): `single_step_tool_use_with_argument_comparison` (domains tau2,
function_calling, search, swe, droid), the string rule of `terminus_judge` (domain terminal) and `swe_pivot`. Written
after what these servers do, tested against their own unit tests where those are present. To train, use `recommended`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, cast, get_args

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verifiers.matching import most_pairs
from turntree.verifiers.strict import MALFORMED, action_kind
from turntree.verifiers.texts import THOUGHT, terminus_in

Domain = Literal["tau2", "function_calling", "search", "swe", "droid", "terminal", "swe_pivot"]
Counting = Literal["ignore", "binary_strict", "fractional", "f1"]
_SIMILARITY: Mapping[str, float] = {"tau2": 0.1, "function_calling": 0.1, "search": 0.3, "swe": 0.0, "droid": 0.0}
_TERMINAL, _PIVOT = 0.9, 0.8
_FLOAT = 1e-6


class Nemo:
    """NVIDIA's comparison of calls.

    Args:
        domain: The server whose rules and threshold apply.
        similarity: In place of its threshold (in terminal and swe_pivot what counts as similar enough).
        counting: How parallel calls are paid: "ignore" is the released default, under which calls beside the
            demonstrated ones cost nothing; the other modes compare their number.
        allow_subset: With another mode than "ignore", accept fewer calls.
        allow_superset: With another mode than "ignore", accept more calls.
    """

    def __init__(
        self,
        *,
        domain: Domain = "tau2",
        similarity: float | None = None,
        counting: Counting = "ignore",
        allow_subset: bool = False,
        allow_superset: bool = False,
    ) -> None:
        for field, value, known in (("domain", domain, get_args(Domain)), ("counting", counting, get_args(Counting))):
            if value not in known:
                raise ConfigError(f"is {value!r}", field=field, hint=f"use one of {', '.join(known)}")
        self._domain, self._counting = domain, counting
        self._subset, self._superset = allow_subset, allow_superset
        self._usual = {**_SIMILARITY, "terminal": _TERMINAL, "swe_pivot": _PIVOT}[domain]
        self._similarity = self._usual if similarity is None else similarity

    @property
    def name(self) -> str:
        options = [f"domain={self._domain}", f"similarity={self._similarity:g}"]
        options += [f"counting={self._counting}"] if self._counting != "ignore" else []
        options += ["allow_subset"] if self._subset else []
        options += ["allow_superset"] if self._superset else []
        return "+".join(["nemo/1", *options])

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind, shown = action_kind(action), state.demonstration
        if self._domain == "terminal":
            reward, reason = self._terminal(shown.content, action.content)
        elif self._domain == "swe_pivot":
            reward, reason = self._pivot(shown, action)
        else:
            reward, reason = self._single_step(shown, action)
        return Verdict(reward, reason, kind)

    # single_step_tool_use_with_argument_comparison

    def _single_step(self, shown: Message, action: Message) -> tuple[float, str]:
        if not shown.tool_calls:
            return (0.0, "a call instead of a message") if action.tool_calls else (1.0, "a message")
        if not action.tool_calls:
            return 0.0, "a message instead of a call"
        wanted, found = len(shown.tool_calls), len(action.tool_calls)
        counts = self._counting != "ignore" and not wanted == found == 1
        if counts and ((found < wanted and not self._subset) or (found > wanted and not self._superset)):
            return 0.0, "another number of calls"
        pairs = most_pairs(shown.tool_calls, action.tool_calls, self._same_call)
        needed = min(wanted, found) if counts and self._subset else wanted
        if counts and self._counting == "f1":
            reward = 2 * pairs / (wanted + found)
        elif counts and self._counting == "fractional":
            reward = pairs / needed
        else:
            reward = float(pairs == needed)
        return reward, "the calls" if reward == 1 else f"{pairs} of {wanted} calls"

    def _same_call(self, shown: ToolCall, tried: ToolCall) -> bool:
        return shown.name == tried.name and self._same(shown.arguments, tried.arguments)

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
        alike = _ratio(wanted["keys"], found["keys"])
        if bool(wanted["commands"]) != bool(found["commands"]):
            alike = 0.0
        return float(alike >= self._similarity), f"similarity {alike:.3f}"

    # swe_pivot

    def _pivot(self, shown: Message, action: Message) -> tuple[float, str]:
        if not shown.tool_calls or not action.tool_calls:
            return 0.0, "no call to compare"
        one, other = shown.tool_calls[0], action.tool_calls[0]
        kinds = _category(one.name), _category(other.name)
        if one.name.lower() != other.name.lower() and (kinds[0] != kinds[1] or kinds[0] == "unknown"):
            return 0.0, "another tool"
        arguments = _read(one.arguments), _read(other.arguments)
        if not _same_target(kinds, *arguments):
            return 0.0, "another target"
        alike = _similarity(kinds, *arguments)
        return float(alike >= self._similarity), f"similarity {alike:.3f}"


def _terminus(text: str) -> dict[str, Any] | None:
    """Strict JSON of either harness, `commands` among it."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = terminus_in(text) if isinstance(row, dict) else None
    return None if found is None else {**found, "commands": row["commands"]}


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


# swe_pivot: what a tool is, what it works on, and how alike its arguments are

_CATEGORIES: Mapping[str, str] = {
    "edit": "str_replace_editor text_editor file_editor code_editor edit_file modify_file update_file file_edit edit"
    " modify apply_patch patch_file apply_diff apply_changes write write_file save_file create_file",
    "bash": "execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd run_shell_cmd"
    " exec_command exec_cmd",
    "search": "grep search_text find_pattern text_search glob find_files file_glob match_files grep_files search_files"
    " find_in_files code_search list_dir ls show_dir ls_dir list_directory",
    "read": "read read_file view_file cat_file view file_view inspect show_file read_file_content",
    "finish": "finish submit",
    "think": "think",
    "planning": "task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks update_tasks"
    " read_todos write_todos edit_plan modify_plan",
}
_CATEGORY_OF = {
    spelling: category
    for category, names in _CATEGORIES.items()
    for name in names.split()
    for spelling in (name, name.replace("_", ""))
}
_PATHS = re.compile(r"""(?:^|[\s='"(])((?:/[\w._-]+)+|\.\.?/[\w._/-]+|[\w._-]+/[\w._/-]+)""")
_MOST, _FLOOR, _COVERED = 2000, 0.3, 0.8


def _category(name: str) -> str:
    return _CATEGORY_OF.get(name.lower(), "unknown")


def _read(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that are not JSON become no arguments, as in the released code."""
    return {} if MALFORMED in arguments else arguments


def _same_target(kinds: tuple[str, str], shown: Mapping[str, Any], tried: Mapping[str, Any]) -> bool:
    """A missing value on either side matches everything: the released rule, and its flaw."""
    if kinds == ("edit", "edit"):
        commands = str(shown.get("command", "")), str(tried.get("command", ""))
        if all(commands) and commands[0] != commands[1]:
            return False
        files = _file(shown), _file(tried)
        if all(files) and _end(files[0], 2) != _end(files[1], 2):
            return False
        return commands != ("view", "view") or _covered(shown.get("view_range"), tried.get("view_range"))
    if kinds == ("bash", "bash"):
        commands = _command(shown), _command(tried)
        if not all(commands):
            return True
        verbs = [command.split()[0].rpartition("/")[2] for command in commands]
        paths = [{_end(p.rstrip("/"), 3) for p in _PATHS.findall(c) if len(p) > 2} - {""} for c in commands]
        if (all(verbs) and verbs[0] != verbs[1]) or (all(paths) and not paths[0] & paths[1]):
            return False
        return _capped(commands[1], commands[0]) >= _FLOOR
    if kinds[0] in ("search", "read") and kinds[1] in ("search", "read"):
        files = _file(shown), _file(tried)
        return not all(files) or _end(files[0], 3) == _end(files[1], 3)
    return True


def _similarity(kinds: tuple[str, str], shown: Mapping[str, Any], tried: Mapping[str, Any]) -> float:
    if kinds == ("edit", "edit"):
        sides = [(str(row.get("old_str", "")), str(row.get("new_str", ""))) for row in (tried, shown)]
        if all(any(side) for side in sides):
            return min(_or_equal(a, b) for a, b in zip(*sides, strict=True))
        contents = _content(tried), _content(shown)
        if not any(contents):
            return 1.0
        return _capped(*contents) if all(contents) else 0.0
    if kinds == ("bash", "bash"):
        commands = _command(tried), _command(shown)
        return _capped(*commands) if all(commands) else 1.0
    return 1.0


def _or_equal(one: str, other: str) -> float:
    return _capped(one, other) if one and other else float(one == other)


def _capped(one: str, other: str) -> float:
    return _ratio(one[:_MOST], other[:_MOST])


def _file(row: Mapping[str, Any]) -> str:
    return next((str(row[k]).strip() for k in ("path", "file", "file_path", "filename", "file_name") if k in row), "")


def _command(row: Mapping[str, Any]) -> str:
    return next((str(row[key]).strip() for key in ("command", "cmd") if key in row), "")


def _content(row: Mapping[str, Any]) -> str:
    if "new_str" in row:
        return f"{row.get('old_str', '')}\n{row['new_str']}"
    for key in ("patch", "diff", "content", "file_text"):
        if key in row:
            return str(row[key])
    return ""


def _end(path: str, count: int) -> str:
    return "/".join(path.strip("/").split("/")[-count:])


def _covered(wanted: Any, asked: Any) -> bool:
    spans: Sequence[tuple[int, int] | None] = [_span(wanted), _span(asked)]
    if spans[0] is None or spans[1] is None:
        return True
    (first, last), (begin, end) = spans[0], spans[1]
    return max(0, min(last, end) - max(first, begin)) / max(1, last - first) >= _COVERED


def _span(raw: Any) -> tuple[int, int] | None:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
        return (int(value[0]), int(value[1])) if isinstance(value, list) and len(value) == 2 else None
    except (TypeError, ValueError):
        return None
