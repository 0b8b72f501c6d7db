"""Tasks of one's own, from a file of JSON lines (docs/environments.md lists the keys).

`setup` is run once, when the file is read. A task whose setup fails in the sandbox, or that the file has already, is
left out and counted by reason. Without `id`, a task is named by what it says, so it has one name in all files.
"""

from __future__ import annotations

import base64
import binascii
import shlex
from collections import Counter
from typing import Any

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.run.identity import fingerprint
from turntree.run.jsonl import located
from turntree.traces.sources import source_rows
from turntree_worlds.sandboxes.folder import checked
from turntree_worlds.sandboxes.limits import File, Files
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.tasks import BASH, Task, commands, run

_KEYS = {
    "id": str, "kind": str, "instruction": str, "files": dict, "setup": str, "gold": list, "answer": str, "check": str,
}  # fmt: skip


def read_tasks(path: str, sandbox: Sandbox, most: int, seed: int) -> tuple[list[Task], dict[str, Any]]:
    """At most `most` tasks of a file, drawn by `seed`: JSON or JSON lines (also .gz, .xz); and what reading counted
    (`env.tasks.TaskSet`). Raises `InputError` with file, line and field."""
    tasks, dropped, names = list[Task](), Counter[str](), set[str]()
    for number, row in seeds.shuffled(seed, enumerate(source_rows(path)), lambda numbered: repr(numbered[1].value)):
        if len(tasks) == most:
            break
        try:
            if isinstance(row.value, InputError):
                raise row.value
            name = f"task-{fingerprint(row.value)}"  # by content: the same task has one name in every file
            if name in names:
                dropped["is in the file already"] += 1
                continue
            names.add(name)
            task = _task(row.value, name, sandbox)
        except InputError as error:
            raise located(error, path=path, line=row.line or number + 1) from error
        if task is None:
            dropped["its setup fails in the sandbox"] += 1
        else:
            tasks.append(task)
    if not tasks:
        raise InputError(f"holds no task that can be played here ({dict(dropped)})", path=path)
    rows = len(tasks) + dropped.total()
    return tasks, {"rows": rows, "kept": len(tasks), "dropped": dict(sorted(dropped.items()))}


def _task(row: dict[str, Any], default_id: str, sandbox: Sandbox) -> Task | None:
    """None where its setup fails."""
    for key, value in row.items():
        if key not in _KEYS:
            raise InputError("is not known", field=key, hint=f"a task has {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]):
            raise InputError(f"is not {_KEYS[key].__name__}", field=key)
    if not row.get("instruction"):
        raise InputError("is missing", field="instruction", hint="say what is to be done")
    if row.get("answer") is None and row.get("check") is None:
        raise InputError("says nothing to judge by", hint="give an answer or a check")
    files: Files = {name: _file(name, value) for name, value in row.get("files", {}).items()}
    checked(files, sandbox.config.limits)
    if row.get("setup"):
        done = run(sandbox, BASH + shlex.quote(row["setup"]), files)
        if done.failed or done.files is None:
            return None
        files = done.files
    gold = [str(line) for line in row.get("gold", [])]
    return Task(
        id=row.get("id", default_id),
        instruction=row["instruction"],
        files=files,
        gold=commands(*gold, answer=row.get("answer", "")) if gold else (),
        kind=row.get("kind"),
        answer=row.get("answer"),
        check=row.get("check"),
    )


def _file(name: str, value: Any) -> File:
    """A text, or {"base64": ..., "mode": 493}."""
    if isinstance(value, str):
        return File(value.encode())
    try:
        return File(base64.b64decode(value["base64"], validate=True), mode=int(value.get("mode", 0o644)))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        hint = 'give a text, or {"base64": "...", "mode": 493}'
        raise InputError("is not a file", field=f"files.{name}", hint=hint) from error
