"""`turntree profile`: traces and a frozen policy in, a profile of every candidate out.

Traces are read one at a time and candidates profiled in waves of fixed membership, each of which is logged when it is
done: memory does not grow with the number of candidates, and a killed profile resumes with its unfinished wave.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from turntree import __version__
from turntree.core import parts
from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState
from turntree.engines.endpoint import connection_free
from turntree.observe.artifacts import PROFILE
from turntree.observe.files import file_hash
from turntree.observe.run import notice, progress
from turntree.observe.wave_log import WaveLog, open_log
from turntree.profiling.profile import Judge, profile_wave
from turntree.profiling.rows import StoredProfile
from turntree.profiling.samples import Sampler, one_by_one, together
from turntree.profiling.stopping import Prior
from turntree.profiling.summary import ProfileSummary
from turntree.rollouts.local import PATH_TOO_LONG, Limits, that_fit
from turntree.stages.candidates import stream_candidates, survey
from turntree.stages.config import ProfileStageConfig
from turntree.stages.policy import Speaker, open_speaker
from turntree.stages.published import write_published
from turntree.stages.verifier import open_verifier
from turntree.verifiers.strict import StrictMatch

T = TypeVar("T")

Wave = dict[str, Any]  # of a profile {"rows", "skipped": reasons with counts, "timing": seconds}


def run_profile(config: ProfileStageConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the profile table to `out`; returns its summary.

    A killed run resumes when it is started again, and ends with the same table except for `timing`. Raises `InputError`
    where the interrupted run was another one, unless `overwrite`.
    """
    config = parts.resolved(config)
    if config.published:
        return write_published(config, out)
    surveyed = survey(config.traces, config.split, config.limit)
    with (
        open_verifier(config.verifier, config.environment) as verifier,
        open_speaker(config.model, config.endpoint, config.device) as policy,
    ):
        answer = together(policy.engine) if config.endpoint is None else one_by_one(policy.engine)
        stored = _stored(config, policy)
        judge = Judge(verifier, StrictMatch(), stored, cut_turns=config.profile.cut_turns)
        made_from = {**policy.identity, "verifier": judge.name, "traces_hash": surveyed.traces_hash}
        sampler = Sampler(answer, policy.renderer, config.profile.sampling, config.profile.seed, stored)
        prior = Prior(config.profile.rollouts)
        longest = config.profile.sampling.max_tokens
        limits = Limits(longest, policy.engine.max_context, config.profile.max_path)

        def profiled(states: Sequence[TurnState]) -> Wave:
            policy.forget()  # a wave must not depend on earlier waves, because a resumed run has not computed them
            fitting, skipped = that_fit(states, policy.renderer, limits)
            found = profile_wave([item for _, item in fitting], sampler, judge, config.profile, prior)
            timing = sum((candidate.cost for candidate in found), NO_COST).timing()
            return {"rows": [one.to_json() for one in found], "skipped": dict(skipped), "timing": timing}

        identity = {**_identity(config), "code": parts.identities(config), **made_from}
        with open_log(out.with_name(f"{out.name}.waves"), identity, overwrite=overwrite) as log:
            states = stream_candidates(config.traces, config.split, config.limit)
            work(
                log, states, surveyed.candidates, config.profile.wave, profiled, lambda wave: prior.learn(wave["rows"])
            )
            header = {"config": to_mapping(config), **made_from}
            return write_profile(
                log, header, ProfileSummary(config.profile.rollouts, config.profile.adaptive), surveyed.skipped, out
            )


# waves of candidates


def _stored(config: ProfileStageConfig, policy: Speaker) -> StoredProfile | None:
    if config.reuse is None:
        return None
    stored = StoredProfile(Path(config.reuse))
    engine = config.device.engine.name
    stored.check_draws(policy.identity, config.profile.sampling, config.profile.seed, engine)
    return stored


def _identity(config: ProfileStageConfig) -> dict[str, Any]:
    """Everything that determines the contents of the waves."""
    settings = {**to_mapping(config), "endpoint": connection_free(config.endpoint)}
    reused = {} if config.reuse is None else {"reuse_hash": file_hash(Path(config.reuse))}
    return {"config": settings, "version": __version__, **reused}


# waves


def work(
    log: WaveLog,
    items: Iterator[T],
    total: int,
    size: int,
    make: Callable[[Sequence[T]], Wave],
    learn: Callable[[Wave], object],
    *,
    what: str = "profile",
    noun: str = "candidates",
) -> None:
    """Compute the waves of `size` items that are not in the log. `learn` gets every wave in order, including those of a
    killed run."""
    for wave in log:
        learn(wave)
    done = min(log.finished * size, total)
    if done:
        notice(f"resuming an interrupted run: {done} of {total} {noun} are done")
    rest = itertools.islice(items, log.finished * size, None)
    with progress((), what, total=total, initial=done) as bar:
        try:
            while members := list(itertools.islice(rest, size)):
                wave = make(members)
                log.append(wave)
                learn(wave)
                bar.update(len(members))
        except BaseException as error:
            if not log.finished:
                log.remove()  # an empty log would only block other settings
            elif isinstance(error, KeyboardInterrupt):
                notice(f"{bar.n:.0f} of {total} {noun} are kept; run the same command again to resume")
            raise


def write_profile(
    log: WaveLog, header: dict[str, Any], found: ProfileSummary, skipped: Counter[str], out: Path
) -> dict[str, Any]:
    """Write the table of all waves with its summary, and delete the log. Raises `InputError` when no candidate could be
    profiled, or no rollout has a reward."""
    seconds = Counter[str](header.get("timing", {}))
    reasons = Counter(skipped)
    for wave in log:
        reasons.update(wave["skipped"])
        seconds.update(wave["timing"])
        for row in wave["rows"]:
            found.add(row)
    if not found.candidates:
        log.remove()
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise InputError(
            f"holds no state that fits ({counted})", path=header["config"]["traces"], hint=_remedy(reasons)
        )
    if not found.scored:
        log.remove()
        counted = ", ".join(f"{count} {reason}" for reason, count in found.unscored.items())
        hint = "look at the model and the verifier; nothing was written"
        raise InputError(f"no rollout has a reward ({counted})", path=header["config"]["traces"], hint=hint)
    summary = found.summary(reasons)
    rows = (row for wave in log for row in wave["rows"])
    PROFILE.write(out, {**header, "summary": summary, "timing": dict(seconds)}, rows)
    log.remove()
    return {"path": str(out), **summary}


def _remedy(reasons: Counter[str]) -> str:
    """What to do where no state fits, by the most frequent reason that something can be done about."""
    remedies = {
        "demonstration_above_max_tokens": "raise --max-tokens",
        "prompt_above_context": "the policy's context is too short for these traces: take another one",
        PATH_TOO_LONG: "raise profile.max_path, and train.max_tokens of the training with it (--set KEY=TOKENS)",
        "renderer_error": "see turntree check model",
    }
    for reason, _ in reasons.most_common():
        if (found := remedies.get(reason.partition(":")[0])) is not None:
            return found
    return "see what was dropped when the traces were imported"
