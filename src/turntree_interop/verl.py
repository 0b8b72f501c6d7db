"""verl: pivots for its `RLHFDataset`, our verifier as its `custom_reward_function`, and its rollout dumps.

Dumps (`trainer.rollout_data_dir`, one `STEP.jsonl` a step; `RayPPOTrainer._dump_generations`): `input` and `output` are
decoded text without special tokens, `score` is the sum of token-level scores, `gts` the ground truth, `step`; then
whatever the reward function returns beside the score, `request_id` where the agent loop sets one, and in trainer v1
`uid` = "{prompt}_{rollout}_{output}". There are no token counts; `output` of a multi-turn rollout holds the tools'
answers too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from turntree.logs.generic import TextOptions
from turntree.logs.rows import LoggedRow, RowRefused, count, facts_of, named_prompt, text
from turntree_interop.judging import Judge, Settings, pack_state, required, write_reward
from turntree_interop.rows import columns, rollout_of_text, write_parquet

if TYPE_CHECKING:
    from turntree.stages.export import Bundle

SOURCE = "turntree"


def verifier_score(verifier: str = "recommended", **settings: Unpack[Settings]) -> Callable[..., dict[str, Any]]:
    """A `compute_score` for verl. verl knows no missing reward: an action that is not judged stops the run, unless
    `unjudged` (`reward.custom_reward_function.reward_kwargs.unjudged`) says what stands in for it. verl does not say
    whether the response was cut off."""
    judge = Judge(verifier, **settings)

    def compute_score(
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any],
        unjudged: float | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        verdict = judge([(extra_info["state"], judge.action(solution_str))])[0]
        judged = float(verdict.reward is not None)
        return {"score": required(verdict, unjudged), "judged": judged}

    return compute_score


def export_verl(bundle: Bundle, out: Path) -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, whose `compute_score` is the verifier. verl gives all prompts the same
    tools, so the tools of a pivot stand in its system message."""
    rows = [
        {
            "data_source": SOURCE,
            "prompt": pivot.prompt,
            "ability": pivot.kind,
            "reward_model": {"style": "rule", "ground_truth": pivot.state.demonstration.to_chat()},
            "extra_info": {"index": number, "state": pack_state(pivot.state), **columns(pivot)},
        }
        for number, pivot in enumerate(bundle.pivots)
    ]
    write_parquet(out / "pivots.parquet", rows, ("prompt", "reward_model", "extra_info"))
    names = ("turntree_interop.verl", "verifier_score", "compute_score")
    write_reward(out, "The verifier of these pivots, as verl's compute_score.", names, bundle.reward_settings())
    return {"files": ["pivots.parquet", "reward.py"]}


_OUTPUT = re.compile(r"(.*)_(\d+)_(\d+)", re.DOTALL)  # the uid of an output: its prompt, rollout and number


@dataclass(frozen=True, kw_only=True)
class Verl(TextOptions):
    """verl's rollout dumps. Rollouts of one step with the same `uid` (or prefix of it, where every rollout has a uid of
    its own), or else the same prompt, are one group, the outputs of one session (trainer v1) one rollout; a prompt with
    its gold answer is a task."""

    marks: ClassVar = (frozenset({"input", "output", "score"}),)
    filter_setting: ClassVar = "algorithm.filter_groups.enable=True"
    rewards: tuple[str, ...] = ("score",)

    def row(self, row: dict[str, Any]) -> LoggedRow:
        prompt, output = row.get("input"), row.get("output")
        if not isinstance(prompt, str) or not isinstance(output, str):
            raise RowRefused("no text in field 'input' or 'output'")
        uid = (text(row, "uid") or "").strip()
        if not prompt.strip() and not uid:
            raise RowRefused("neither a prompt nor a uid: its group is not known")
        own = _OUTPUT.fullmatch(uid)
        group = (own[1] if own else uid) or named_prompt(prompt)
        later = int(own[3]) if own else 0  # these are given what was seen in the earlier ones, or a summary
        return LoggedRow(
            group=group,
            task=named_prompt(prompt) if prompt.strip() else group,
            rollout=rollout_of_text(row, output, self),
            iteration=count(row, "step"),
            task_type=text(row, "data_source"),
            facts=facts_of(row, input=None if later else prompt),
            name=uid or None,
            whole=own and own[2],
            output=later,
        )
