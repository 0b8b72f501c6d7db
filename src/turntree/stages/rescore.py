"""`turntree rescore`: a profile and a changed verifier in, the profile under that verifier out. Nothing is sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turntree.core.config import from_mapping, to_mapping
from turntree.core.cost import Cost
from turntree.core.protocols import TurnState
from turntree.pivots.profile import Draft, Judge, judge_drafts
from turntree.pivots.rows import StoredProfile, samples_of
from turntree.pivots.stopping import Prior, StoppingRule
from turntree.pivots.summary import ProfileSummary
from turntree.run.artifacts import policy_of, require_same_profile
from turntree.run.files import file_hash
from turntree.run.wave_log import open_log
from turntree.stages.candidates import stream_candidates, survey
from turntree.stages.config import ProfileStageConfig, RescoreConfig
from turntree.stages.profile import Wave, work, write_profile
from turntree.stages.verifier import open_verifier


def run_rescore(config: RescoreConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write to `out` the profile of the same samples under `config.verifier`, and return its summary.

    The costs are those of the samples. Of an adaptive profile, candidates that the new verdicts leave uncertain are
    marked "open"; `turntree profile --adaptive --reuse` settles them. Raises `InputError` when the traces are not those
    that were profiled.
    """
    stored = StoredProfile(Path(config.profile))
    made = from_mapping(ProfileStageConfig, stored.header["config"], path=config.profile)
    made = replace(made, verifier=config.verifier, environment=config.environment, traces=config.traces or made.traces)
    surveyed = survey(made.traces, made.split, stored.header["traces_hash"])
    with open_verifier(config.verifier, config.environment) as verifier:
        judge = Judge(verifier, made.profile)
        rollouts, adaptive = made.profile.rollouts, made.profile.adaptive
        stopping = adaptive and StoppingRule(replace(adaptive, confidence=1.0), rollouts, Prior(rollouts))

        def judged(states: Sequence[TurnState]) -> Wave:
            kept = [(row, state) for state in states if (row := stored.row(state)) is not None]
            told = judge.demonstrated([state for _, state in kept])
            found = [(row, Draft(state, judge, one)) for (row, state), one in zip(kept, told, strict=True)]
            for row, draft in found:
                draft.add(samples_of(row))
            judge_drafts([draft for _, draft in found], judge)
            rows: list[dict[str, Any]] = []
            for row, draft in found:
                if stopping is not None and row["rollouts"] < rollouts:
                    draft.look(stopping)
                rows.append(draft.finish(rollouts, Cost(**row["cost"])).to_json())
            return {"rows": rows, "skipped": {}, "timing": {}}

        made_from = {**policy_of(stored.header), "traces_hash": stored.header["traces_hash"], "verifier": judge.name}
        header = {"config": to_mapping(made), **made_from, "timing": stored.header.get("timing", {})}
        require_same_profile(out, header, overwrite=overwrite)
        identity = {"config": to_mapping(config), "profile": file_hash(stored.path), **made_from}
        skipped = stored.header["summary"].get("skipped_turns", {})
        with open_log(out.with_name(f"{out.name}.waves"), identity, overwrite=overwrite) as log:
            states = stream_candidates(made.traces, made.split)  # those without a row are passed over
            work(log, states, surveyed.candidates, made.profile.wave, judged)
            return write_profile(log, header, ProfileSummary(rollouts, adaptive), Counter(skipped), out)
