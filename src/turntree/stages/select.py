"""`turntree select`: a profile in, the training states out, with a preview of what each threshold keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.pivots.rows import Class, Stop
from turntree.pivots.select import THRESHOLDS, SelectConfig, preview, select, settled_at
from turntree.run.artifacts import PIVOTS, PROFILE, policy_of
from turntree.run.files import require_table

KEPT = ("trace_id", "turn", "kind", "reward_mean", "reward_var", "state", "demonstrated")


def previewed(table: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for every threshold of a preview."""
    for row in table:
        kinds = ", ".join(f"{kind} {count}" for kind, count in row["kinds"].items())
        name = f"lambda {row['threshold']:.2f}" if row["threshold"] <= 1 else "every mixed"
        yield f"{name}: pivots {row['pivots']:5d}  ({kinds})"


def run_select(profile: Path, config: SelectConfig, out: Path) -> dict[str, Any]:
    """Write the selected states to `out`; returns the counts (they add up to the candidates) and the preview."""
    require_table(out, PIVOTS.schema)
    header, stream = PROFILE.stream(profile)
    rows: list[dict[str, Any]] = []
    unsettled = 0
    for row in stream:
        rows.append({key: row[key] for key in KEPT if key in row})  # the actions stay on disk
        unsettled += row.get("stop") == Stop.OPEN
    settled = settled_at(header)
    if settled is not None and settled != config.threshold:
        problem = f"was made for lambda {settled:g}: its rollouts stopped where that was settled"
        hint = f"select with --threshold {settled:g}, or profile for {config.threshold:g} (see --reuse)"
        raise InputError(problem, path=profile, field="threshold", hint=hint)
    selection = select(rows, config)
    table = preview(rows, THRESHOLDS if settled is None else (settled,))
    if not selection.rows:
        for line in previewed(table):
            notice(line)
        counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(selection.counts.items()) if count)
        higher = "raise --threshold, " if selection.counts.get(Class.EASY) else ""  # which keeps mixed rewards only
        hint = f"{higher}profile more candidates, or use more rollouts"
        if rows and selection.counts.get(Class.SUCCEED) == len(rows):
            hint = "the policy has mastered every turn: take harder traces, or fewer epochs of SFT before"
        raise InputError(f"holds no pivot ({counted})", path=profile, hint=hint)
    summary = {
        "selected": len(selection.rows),
        "roles": dict(sorted(Counter(row["role"] for row in selection.rows).items())),
        "kinds": dict(sorted(Counter(row["kind"] for row in selection.rows).items())),
        "classes": dict(selection.counts),
        "unsettled": unsettled,
        "preview": table,
    }
    made_from = {
        **policy_of(header),
        **{key: header[key] for key in ("verifier", "traces_hash")},
        "sampling": header["config"]["profile"]["sampling"],
        "cut": header["summary"]["truncated"],  # rollouts that reached sampling.max_tokens
        "traces": header["config"]["traces"],
        "verifier_source": header["config"]["verifier"],
        "split": header["config"]["split"],
    }
    PIVOTS.write(out, {"config": to_mapping(config), **made_from, "summary": summary}, selection.rows)
    return {"path": str(out), **summary}
