"""The kind of tool that a call uses, by its name, and the roles of its arguments.

Agents call the same few kinds of tools by many names. A name that is not known here is of kind "other": all its
arguments act and are compared as they are declared. A verifier's option `kinds` names more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal, cast

from turntree.core.messages import ToolCall

Kind = Literal["shell", "edit", "read", "search", "open", "finish", "think", "other"]

_NAMES: Mapping[Kind, str] = {
    "shell": "executebash bash shell runbash runshell terminal runterminalcmd execcommand executecommand runcommand"
    " shellcommand shellcmd runshellcommand bashexec cmdrun execute execcmd localshell executeshell containerexec"
    " bashcommand runcmd console",
    "edit": "strreplaceeditor strreplacebasededittool edit editfile write writefile createfile strreplace texteditor"
    " fileeditor multiedit applypatch replace replaceinfile insert create savefile searchreplace strreplaceedit",
    "read": "read readfile view viewfile cat openfile showfile fileread catfile",
    "search": "search websearch googlesearch searchweb tavilysearch browsersearch bingsearch searchquery internetsearch"
    " searchengine querysearch wikipediasearch searchwikipedia",
    "open": "webfetch fetch openurl browse visit gotourl goto fetchurl openpage webbrowse visitpage",
    "finish": "finish submit done completetask taskcomplete exit attemptcompletion markcomplete",
    "think": "think",
}
_SHELL_NAME = re.compile(r"bash|shell|sh$", re.IGNORECASE)
_KIND_OF: dict[str, Kind] = {name.replace("_", ""): kind for kind, names in _NAMES.items() for name in names.split()}

# arguments that do not act, by the kind of the tool (the same word may act elsewhere: an issue's `description`)
_TALK = frozenset({"description", "explanation", "justification", "security_risk", "thought", "toolSummary", "summary"})
_PATIENCE = frozenset(
    {"timeout", "timeout_ms", "timeout_sec", "timeout_seconds", "timeout_secs", "yield_time_ms", "max_output_tokens"}
)
_WAITING = frozenset({"duration", "wait"})  # of a tool that types: how long it looks on before it shows the screen
IDLE: Mapping[Kind, frozenset[str]] = {
    "shell": _TALK | _PATIENCE,
    "edit": _TALK | {"instructions"},
    "read": _TALK,
    "search": _TALK | _PATIENCE | {"reason"},
    "open": _TALK | _PATIENCE | {"reason"},
    "finish": _TALK,
    "think": frozenset({"thought", "thinking", "text"}),
    "other": frozenset(),
}
KEYSTROKES = "keystrokes"  # what is typed, and not run as a whole
COMMAND = ("command", "cmd", "script", KEYSTROKES, "commands", "code")
FOLDER = ("workdir", "cwd", "working_directory", "working_dir", "dir_path")
PATH = ("path", "file_path", "filePath", "filename", "file", "target_file", "absolute_path", "notebook_path")
QUERY = ("query", "q", "search_query", "queries", "keywords", "search_term")
URL = ("url", "link", "uri", "urls")
_SCOPES = frozenset(
    {*PATH, *FOLDER, "paths", "dir", "directory", "directories", "target_directories", "folder", "root"}
)
_SCOPES |= {"glob", "globs", "include", "exclude", "pattern", "include_pattern", "exclude_pattern", "file_pattern"}
_SCOPES |= {"file_glob", "regex", "is_regex", "case_sensitive"}
_ANSWERS = frozenset({"message", "summary", "description", "explanation", "justification"})  # may be, of a finish tool
_OUTCOMES = ("task_completed", "answer", "final_answer", "result")
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentRequired", "dependencies"})
TEXTS = ("old_str", "old_string", "oldString", "search", "new_str", "new_string", "newString", "replace")  # of an edit
TEXTS += ("file_text", "content", "contents", "text")


def kind_of(call: ToolCall, more: Mapping[str, Kind] | None = None) -> Kind:
    """The kind of a call. The editor whose `command` is "view" reads; a tool that is called like a shell and takes no
    command is another tool."""
    kind = more.get(call.name) if more else None
    if kind is None:
        plain = call.name.lower().replace("_", "").replace("-", "").replace(".", "")
        kind = _KIND_OF.get(plain, "other")
    if kind == "other":
        return kind
    if kind == "shell" and "code" in call.arguments and not _SHELL_NAME.search(call.name):
        return "other"  # code of any language
    if kind in _NEEDS and of_any(call.arguments, _NEEDS[kind]) is None:
        return "other"
    if kind == "edit" and call.arguments.get("command") == "view":
        return "read"
    return kind


# what a tool of a kind must be told: an `insert` without a path inserts something else
_NEEDS: Mapping[Kind, tuple[str, ...]] = {"shell": COMMAND, "edit": PATH, "read": PATH, "search": QUERY, "open": URL}


def idle_of(call: ToolCall, kind: Kind, parameters: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The arguments of a call that do not act. `parameters`: the declared schema of its tool, if there is one."""
    if kind == "finish":
        return _idle_at_the_end(call, parameters)
    return IDLE[kind] | _WAITING if kind == "shell" and types(call) else IDLE[kind]


def _idle_at_the_end(call: ToolCall, parameters: Mapping[str, Any] | None) -> frozenset[str]:
    """Of a finish tool. Its text may be the answer, unless another argument says the outcome (OpenHands'
    `task_completed`) or the schema lets it be left out."""
    idle = IDLE["finish"] | {"message"} if call.name == "finish" else IDLE["finish"]
    if of_any(call.arguments, _OUTCOMES) is not None:
        return idle
    if parameters is None or not _COMPOSED.isdisjoint(parameters):  # what is required is not known
        return idle - _ANSWERS
    return idle - (_ANSWERS & frozenset(cast("list[str]", parameters.get("required") or ())))


def asks_in_words(call: ToolCall, asked: str, parameters: Mapping[str, Any] | None = None) -> bool:
    """Whether a search is for words. One in files is for code or a pattern, in which every letter counts."""
    declared = cast("Mapping[str, Any]", (parameters or {}).get("properties") or {})
    return "\\" not in asked and _SCOPES.isdisjoint(call.arguments) and _SCOPES.isdisjoint(declared)


def types(call: ToolCall) -> bool:
    """Whether the command of a call is what it types into a terminal."""
    command = of_any(call.arguments, COMMAND)
    return command is not None and command[0] == KEYSTROKES


def of_any(arguments: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any] | None:
    """The first of these arguments that is given, with its value."""
    return next(((name, arguments[name]) for name in names if arguments.get(name) is not None), None)


def command_text(value: Any) -> str | None:
    """The script of a shell's argument, which may be a list of words (`["bash", "-lc", SCRIPT]`)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(word, str) for word in cast("list[Any]", value)):
        words = cast("list[str]", value)
        if len(words) == 3 and words[0].rpartition("/")[2] in ("bash", "sh", "zsh") and words[1] in ("-c", "-lc"):
            return words[2]
        return shlex.join(words)
    return None


def interpreter(value: Any) -> str:
    """The shell that a list of words names (`["sh", "-c", SCRIPT]`): what runs in bash need not run in another."""
    first = cast("list[Any]", value)[0] if isinstance(value, list) and value else ""
    name = str(first).rpartition("/")[2]
    return name if name in ("sh", "zsh") else "bash"


def lines_of(arguments: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """The lines that a reading call asks for, from 1, both ends inside (None: to the end); None for another form, or
    for several at once, of which a tool reads one."""
    if sum(not names.isdisjoint(arguments) for names in _RANGES) > 1:
        return None
    span = arguments.get("view_range")
    if isinstance(span, list) and len(cast("list[Any]", span)) == 2:
        first, last = cast("list[Any]", span)
    elif "offset" in arguments or "limit" in arguments:
        first, limit = arguments.get("offset", 1), arguments.get("limit")
        last = -1 if limit is None else first + limit - 1 if _whole(first) and _whole(limit) else None
    elif "start_line" in arguments or "end_line" in arguments:
        first, last = arguments.get("start_line", 1), arguments.get("end_line", -1)
    elif span is None:
        return 1, None
    else:
        return None
    if not (_whole(first) and _whole(last)):
        return None
    return int(cast(int, first)), (None if last == -1 else int(cast(int, last)))


_RANGES = (frozenset({"view_range"}), frozenset({"offset", "limit"}), frozenset({"start_line", "end_line"}))
RANGE = frozenset[str]().union(*_RANGES)


def _whole(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
