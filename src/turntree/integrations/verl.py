"""verl: a parquet file for its `RLHFDataset`, and our verifier as its `custom_reward_function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turntree.integrations.judging import Judge, pack_state, required, write_reward
from turntree.integrations.rows import columns, write_parquet
from turntree.renderers.tool_calls import ToolFormat
from turntree.rollouts.local import CutTurns
from turntree.stages.export import Bundle

SOURCE = "turntree"


def verifier_score(
    verifier: str = "recommended",
    *,
    options: Mapping[str, Any] | None = None,
    tool_format: ToolFormat = "hermes",
    cut_turns: CutTurns = "fail",
) -> Callable[..., dict[str, Any]]:
    """A `compute_score` for verl. verl knows no missing reward: an action that is not judged stops the run, unless
    `unjudged` (`reward.custom_reward_function.reward_kwargs.unjudged`) says what stands in for it. verl does not say
    whether the response was cut off."""
    judge = Judge(verifier, options=options, tool_format=tool_format, cut_turns=cut_turns)

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
    names = ("turntree.integrations.verl", "verifier_score", "compute_score")
    write_reward(out, "The verifier of these pivots, as verl's compute_score.", names, bundle.reward_settings())
    return {"files": ["pivots.parquet", "reward.py"]}
