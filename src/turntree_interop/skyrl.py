"""SkyRL: a parquet file for its `PromptDataset`, an environment of one turn that our verifier judges, and its dumps.

Dumps (`dump_per_dataset_eval_results`; one file a data source, in a folder a step): input_prompt and output_response as
decoded text, score (a number, or one a token, whose sum is the reward), stop_reason, env_class, env_extras and
data_source. No uid is among them: rollouts of one prompt are a group. Where every step of a trajectory is a row of its
own (`generator.step_wise_trajectories`), a row whose prompt goes on from that of the row before is its next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from turntree.logs.generic import TextOptions
from turntree.logs.grouping import grouped, parsed, read_each
from turntree.logs.groups import LoggedGroup
from turntree.logs.rows import LoggedRow, ReadReport, RowRefused, facts_of, named_prompt, step_of, text
from turntree_interop.judging import Judge, Settings, pack_state, required, write_reward
from turntree_interop.rows import columns, rollout_of_text, write_parquet

if TYPE_CHECKING:
    from turntree.stages.export import Bundle

ENVIRONMENT = "turntree_pivot"


def pivot_environment(verifier: str = "recommended", **settings: Unpack[Settings]) -> type:
    """The class of the environment, registered as `turntree_pivot` in `skyrl_gym`: one action, judged at the state of
    the row. SkyRL knows no missing reward: an action that is not judged stops the run, unless the environment's
    configuration says what stands in for it (`environment.skyrl_gym.turntree_pivot.unjudged`)."""
    import skyrl_gym  # pyright: ignore[reportMissingImports]
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # pyright: ignore[reportMissingImports]

    judge = Judge(verifier, **settings)

    class PivotEnvironment(BaseTextEnv):
        """One action at a pivot."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self._state = str((extras or {})["reward_spec"]["state"])
            self._unjudged = getattr(env_config, "get", lambda _: None)("unjudged")

        def step(self, action: str) -> Any:
            verdict = judge([(self._state, judge.action(action))])[0]
            told = {"judged": float(verdict.reward is not None), "reason": verdict.reason}
            reward = required(verdict, self._unjudged)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=told)

    skyrl_gym.register(id=ENVIRONMENT, entry_point=PivotEnvironment)
    return PivotEnvironment


def export_skyrl(bundle: Bundle, out: Path) -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, which registers the environment. SkyRL passes no tools to the chat
    template, so the tools of a pivot stand in its system message."""
    rows = [
        {
            "data_source": "turntree",
            "prompt": pivot.prompt,
            "env_class": ENVIRONMENT,
            "reward_spec": {"method": "rule", "state": pack_state(pivot.state)},
            "extra_info": columns(pivot),
        }
        for pivot in bundle.pivots
    ]
    write_parquet(out / "pivots.parquet", rows, ("prompt", "reward_spec", "extra_info"))
    names = ("turntree_interop.skyrl", "pivot_environment", "PivotEnvironment")
    says = "Registers the environment of these pivots in skyrl_gym: import it before training starts."
    write_reward(out, says, names, bundle.reward_settings())
    return {"files": ["pivots.parquet", "reward.py"]}


Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SkyRL(TextOptions):
    """SkyRL's dumps."""

    marks: ClassVar = (frozenset({"input_prompt", "output_response", "score"}),)
    folders: ClassVar = ("dumped_evals/*/*.jsonl",)
    beside: ClassVar = ("aggregated_results.jsonl",)  # figures of the evaluation
    filter_setting: ClassVar = "trainer.algorithm.dynamic_sampling.type=filter"
    rewards: tuple[str, ...] = ("score",)

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        for path in paths:
            found = _trajectories(parsed(path, report))
            rows = read_each(partial(self._row, step=step_of(path)), found, path, report)
            yield from grouped(rows, path, report)

    def _row(self, steps: Sequence[Row], *, step: int | None) -> LoggedRow:
        first, last = steps[0], steps[-1]
        prompt, stop = text(first, "input_prompt") or "", text(last, "stop_reason")
        scores = {name: _total([one.get(name) for one in steps]) for name in self.rewards if name in last}
        if stop in ("error", "abort"):
            scores = dict.fromkeys(self.rewards)  # no reward
        said = [text(one, "output_response") or "" for one in steps]
        extras = cast("Row", first["env_extras"] if isinstance(first.get("env_extras"), dict) else {})
        asked = extras.get("reward_spec", extras.get("reward_model"))
        completed = None if stop is None else stop != "length"
        rollout = rollout_of_text(first | scores, "".join(said), self, stop=stop, completed=completed)
        if len(steps) > 1:  # a row has what was seen after its answer at the end of it
            rollout = replace(rollout, actions=tuple(said), observations=(prompt, *[""] * (len(said) - 1)))
        return LoggedRow(
            group=named_prompt(prompt),
            rollout=rollout,
            iteration=step,
            task_type=text(first, "data_source"),
            # what the task itself says is right, whatever else an environment keeps there
            facts=facts_of(first, prompt=prompt, reward_model=asked, extra_info=extras.get("extra_info")),
        )


def _trajectories(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, list[Row]]]:
    """The rows of every trajectory, with the line of its first."""
    steps: list[Row] = []
    begun = 0
    for line, row in rows:
        if not (steps and _goes_on(steps[-1], row)):
            if steps:
                yield begun, steps
            begun, steps = line, []
        steps.append(row)
    if steps:
        yield begun, steps


def _goes_on(before: Row, row: Row) -> bool:
    asked, said = before.get("input_prompt"), before.get("output_response")
    return (
        isinstance(asked, str) and isinstance(said, str) and bool(said)
        and str(row.get("input_prompt")).startswith(asked + said)
    )  # fmt: skip


def _total(scores: list[Any]) -> Any:
    """The sum of the scores of all steps, each a number or one a token; of a step without one there is none."""
    if len(scores) == 1 and not isinstance(scores[0], list):
        return scores[0]
    flat = [one for score in scores for one in (cast("list[Any]", score) if isinstance(score, list) else [score])]
    if any(one is None or one != one for one in flat):
        return None
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in flat):
        raise RowRefused("a list of scores holds something else than numbers")
    try:
        total = math.fsum(flat)
    except (OverflowError, ValueError):
        total = math.nan
    if not math.isfinite(total):
        raise RowRefused("a list of scores has no sum")
    return total
