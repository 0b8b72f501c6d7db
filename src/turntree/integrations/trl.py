"""TRL, in both directions.

*Pivots out* (`--to trl`, `dataset`, `verifier_reward`): the dataset of a `GRPOTrainer`, and our verifier as its reward
function. TRL drops an unjudged completion from its group (None), so a verifier that fails gives no reward here either.

*Environments in* (`trl:module:Class`): the class that TRL's `environment_factory` takes, unchanged.

`tasks` is a JSONL file. The columns of a row are the arguments of `reset`. The column `prompt` is among them where
`reset` takes it: these are the opening messages, to the last of which is appended what `reset` returns. An exception
in a tool is answered as text. The reward is what `get_reward` of the object returns, or its attribute `reward`, or
what the option `reward` (`module:function`) returns, called as TRL does: `reward(environments=[...], prompts=[...],
completions=[...], **columns)` gives a list of numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turntree.adapters.base import named, prompt_of, rows_of, scored
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.protocols import Environment
from turntree.environments.tool_environment import ToolEnvironment
from turntree.integrations.judging import Judge, write_reward
from turntree.integrations.rows import row_of, write_parquet
from turntree.renderers.tool_calls import ToolFormat
from turntree.rollouts.local import CutTurns
from turntree.stages.export import Bundle, ExportConfig, ExportedPivot, bundle_of

if TYPE_CHECKING:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

PromptForm = Literal["auto", "messages", "text"]
"""messages: TRL applies the chat template, to which it passes no tools. text: rendered here, exact with tools too.
auto: text where a model was named and pivots have tools."""


def verifier_reward(
    verifier: str = "recommended",
    *,
    options: Mapping[str, Any] | None = None,
    tool_format: ToolFormat = "hermes",
    cut_turns: CutTurns = "fail",
    stop_ids: Collection[int] = (),
) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainers: `reward(prompts, completions, **columns)`, one reward per completion and
    None where the verifier does not judge.

    It needs the column `state` of an exported dataset. `stop_ids` are the ids that end a turn of the policy: with them
    a completion that was cut off gets 0 (`cut_turns`); without them TRL does not say which one was, and its text is
    judged.
    """
    judge = Judge(verifier, options=options, tool_format=tool_format, cut_turns=cut_turns)
    ends = frozenset(stop_ids)

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        state: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:
        if state is None:
            hint = "train on the dataset of `turntree export pivots --to trl`, without remove_unused_columns"
            raise InputError("is not among the columns of the dataset", field="state", hint=hint)
        sampled: Sequence[Sequence[int]] = completion_ids or [()] * len(completions)
        cut = [bool(ends) and len(ids) > 0 and ids[-1] not in ends for ids in sampled]
        actions = [judge.action(said, cut=one) for said, one in zip(completions, cut, strict=True)]
        return [verdict.reward for verdict in judge(list(zip(state, actions, strict=True)))]

    reward.__name__ = f"turntree_{verifier.replace(':', '_').replace('.', '_')}"  # TRL logs it by this name
    return reward


def dataset(
    pivots: str, *, traces: str | None = None, verifier: str | None = None, model: str = "", prompt: PromptForm = "auto"
) -> Dataset:
    """A pivots file as the `train_dataset` of a `GRPOTrainer`, with the columns of `--to trl`."""
    from datasets import Dataset, Features, Json, Value  # pyright: ignore[reportMissingImports]

    part = None if verifier is None else Part(verifier)
    config = ExportConfig(pivots=pivots, pivot_format=Part("trl"), traces=traces, verifier=part, model=model)
    rows = _rows(bundle_of(config).pivots, prompt)
    texts = isinstance(rows[0]["prompt"], str)
    kinds = {"turn": "int64", "pass_rate": "float64", "reward_var": "float64", "weight": "float64"}
    told: dict[str, Any] = {name: Value(kinds.get(name, "string")) for name in rows[0]}
    told |= {name: Json() for name in ("prompt", "demonstration") if name != "prompt" or not texts}
    return Dataset.from_list(rows, features=Features(told))


def export_trl(bundle: Bundle, out: Path, *, prompt: PromptForm = "auto") -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, whose `reward` is the verifier.

    Args:
        prompt: As messages, to which TRL passes no tools, or as text that is rendered here (auto: text where a model
            was named and pivots have tools).
    """
    rows = _rows(bundle.pivots, prompt)
    texts = isinstance(rows[0]["prompt"], str)
    write_parquet(out / "pivots.parquet", rows, ("demonstration",) if texts else ("prompt", "demonstration"))
    names = ("turntree.integrations.trl", "verifier_reward", "reward")
    settings = {**bundle.reward_settings(), "stop_ids": bundle.stop_ids}
    write_reward(out, "The verifier of these pivots, as a reward function of TRL.", names, settings)
    return {"files": ["pivots.parquet", "reward.py"], "prompt": "text" if texts else "messages"}


def _rows(pivots: Sequence[ExportedPivot], prompt: PromptForm) -> list[dict[str, Any]]:
    rendered = all(pivot.text is not None for pivot in pivots)
    if prompt == "text" and not rendered:
        raise ConfigError("needs the policy's chat template", field="pivot_format.prompt", hint="name it with --model")
    texts = prompt == "text" or (prompt == "auto" and rendered and any(pivot.state.tools for pivot in pivots))
    return [{**row_of(pivot), **({"prompt": pivot.text} if texts else {})} for pivot in pivots]


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
    """At most `count` rows of the split, one environment each (`base.rows_of` says which row is in which split).

    Args:
        tasks: A file of rows: what `reset` takes, and a prompt.
        held_out: A second such file, for held-out tasks (default: the first one is split by a hash of the row).
        reward: A reward function of TRL that judges an episode, as module:function.
    """
    name = named(argument, "trl:module:Class")
    owner = parts.load("environments", name).target
    if not inspect.isclass(owner) or not callable(getattr(owner, "reset", None)):
        raise InputError(f"{name!r} is not a class with a reset", field="environment", hint="name the class itself")
    return [
        scored(
            ToolEnvironment(
                owner,
                task_id=task_id,
                arguments={key: value for key, value in row.items() if key != "prompt" or _takes_prompt(owner)},
                prompt=prompt_of(row.get("prompt"), tasks),
                task_type=owner.__name__,
            ),
            reward,
            row,
        )
        for task_id, row in rows_of(tasks, held_out, split, count, seed)
    ]


def _takes_prompt(owner: type) -> bool:
    """Whether `reset` has a place for the column `prompt`, which TRL gives to every class."""
    taken = inspect.signature(owner.reset).parameters  # pyright: ignore[reportAttributeAccessIssue]
    return "prompt" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())
