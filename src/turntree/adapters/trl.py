"""`trl:module:Class`: the class that TRL's `environment_factory` takes, unchanged.

`tasks` is a JSONL file. The columns of a row are the arguments of `reset`, the column `prompt` excepted: these are the
opening messages, to the last of which is appended what `reset` returns. An exception in a tool is answered as text.
The reward is the attribute `reward` of the object, or what the option `reward` (`module:function`) returns, called as
TRL does: `reward(environments=[...], prompts=[...], completions=[...], **columns)` gives a list of numbers.
"""

from __future__ import annotations

import inspect

from turntree.adapters.base import named, prompt_of, rows_of, scored
from turntree.core import parts
from turntree.core.errors import InputError
from turntree.core.protocols import Environment
from turntree.environments.tool_environment import ToolEnvironment


def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    tasks: str,
    held_out: str | None = None,
    reward: str | None = None,
) -> list[Environment]:
    """At most `count` rows of the split, one environment each (`base.rows_of` says which row is in which split)."""
    name = named(argument, "trl:module:Class")
    owner = parts.load("environments", name).target
    if not inspect.isclass(owner) or not callable(getattr(owner, "reset", None)):
        raise InputError(f"{name!r} is not a class with a reset", field="environment", hint="name the class itself")
    return [
        scored(
            ToolEnvironment(
                owner,
                task_id=task_id,
                arguments={key: value for key, value in row.items() if key != "prompt"},
                prompt=prompt_of(row.get("prompt"), tasks),
                task_type=owner.__name__,
            ),
            reward,
            row,
        )
        for task_id, row in rows_of(tasks, held_out, split, count, seed=seed)
    ]
