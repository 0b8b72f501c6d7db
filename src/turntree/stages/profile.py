"""`turntree profile`: traces and a frozen policy in, a profile of every candidate out.

Traces are read one at a time and candidates profiled in waves of fixed membership, each of which is logged when it is
done: memory does not grow with the number of candidates, and a killed profile resumes with its unfinished wave.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from turntree.core import parts
from turntree.core.config import Part, to_mapping
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.messages import action_kind
from turntree.core.progress import notice, progress
from turntree.core.protocols import Renderer, TurnState
from turntree.pivots.profile import Judge, profile_wave
from turntree.pivots.rows import PUBLISHED, StoredProfile, rates
from turntree.pivots.samples import Sampler, one_by_one, together
from turntree.pivots.stopping import Prior
from turntree.pivots.summary import UNJUDGED, ProfileSummary
from turntree.rollout.local import PATH_TOO_LONG, Limits, that_fit
from turntree.run.artifacts import MOST_ROLLOUTS, POLICY, PROFILE, require_same_profile
from turntree.run.files import file_hash
from turntree.run.wave_log import WaveLog, open_log
from turntree.stages.candidates import stream_candidates, survey
from turntree.stages.config import ProfileStageConfig
from turntree.stages.gradients import remedy
from turntree.stages.verifier import open_verifier
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace, read_traces

if TYPE_CHECKING:  # torch comes with it, and `rescore` writes profiles where there is none
    from turntree.stages.policy import Speaker

T = TypeVar("T")

Wave = dict[str, Any]  # of a profile {"rows", "skipped": reasons with counts, "timing": seconds}


def run_profile(config: ProfileStageConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the profile table to `out`; returns its summary.

    A killed run resumes when it is started again, and ends with the same table except for `timing`. Raises `InputError`
    where the interrupted run, or the finished profile that lies there, was another one, unless `overwrite`.
    """
    config = parts.resolved(config)
    if config.published:
        return write_published(config, out, overwrite=overwrite)
    surveyed = survey(config.traces, config.split)
    chosen = surveyed.draw(config.limit, config.profile.seed)
    with open_profiler(config) as profiler:
        made_from = {**profiler.identity, "traces_hash": surveyed.traces_hash}
        prior = Prior(config.profile.rollouts)
        header = {"config": to_mapping(config), **made_from}
        require_same_profile(out, header, overwrite=overwrite)
        reused = {} if config.reuse is None else {"reuse_hash": file_hash(Path(config.reuse))}
        identity = {**header, "code": parts.identities(config), **reused}
        with open_log(out.with_name(f"{out.name}.waves"), identity, overwrite=overwrite) as log:
            if not log.finished:  # a resumed run has said it
                states = stream_candidates(config.traces, config.split, chosen)
                say_lengths(states, config.profile.sampling.max_tokens, profiler.policy.renderer)
            states = stream_candidates(config.traces, config.split, chosen)
            work(
                log,
                states,
                len(chosen),
                config.profile.wave,
                lambda batch: profiler.profiled(batch, prior),
                learn=lambda wave: prior.learn(wave["rows"]),
            )
            summary = ProfileSummary(config.profile.rollouts, config.profile.adaptive)
            return write_profile(log, header, summary, surveyed.skipped, out)


def say_lengths(states: Iterable[TurnState], limit: int, renderer: Renderer) -> None:
    """Before anything is sampled: how many demonstrated turns are too long, and which limits take how many."""
    lengths: list[int] = []
    for state in states:
        with contextlib.suppress(Exception):  # what cannot be rendered is counted where it would be sampled
            lengths.append(len(renderer.completion(state.demonstration)))
    if above := sum(length > limit for length in lengths):
        lengths.sort()
        takes = {share: lengths[(len(lengths) * share + 99) // 100 - 1] for share in (50, 90, 100)}
        told = ", ".join(f"{length} takes {share}%" for share, length in takes.items())
        notice(f"{above} of {len(lengths)} demonstrated turns are longer than --max-tokens {limit}: {told}")


@dataclass(frozen=True)
class Profiler:
    """What a profile needs beside its candidates. `identity` names the policy and the rule."""

    config: ProfileStageConfig
    policy: Speaker
    sampler: Sampler
    judge: Judge
    identity: dict[str, str]

    def profiled(self, states: Sequence[TurnState], prior: Prior) -> Wave:
        """One wave. It must not depend on earlier waves, because a resumed run has not computed them."""
        self.policy.engine.clear_cache()
        settings = self.config.profile
        limits = Limits(settings.sampling.max_tokens, self.policy.engine.max_context, settings.max_path)
        fitting, skipped = that_fit(states, self.policy.renderer, limits)
        found = profile_wave([item for _, item in fitting], self.sampler, self.judge, settings, prior)
        timing = sum((candidate.cost for candidate in found), NO_COST).timing()
        return {"rows": [one.to_json() for one in found], "skipped": dict(skipped), "timing": timing}


@contextlib.contextmanager
def open_profiler(config: ProfileStageConfig) -> Iterator[Profiler]:
    from turntree.stages.policy import open_speaker

    with (
        open_speaker(config.model, config.endpoint, config.device) as policy,
        open_verifier(config.verifier, config.environment) as verifier,
    ):
        answer = together(policy.engine) if config.endpoint is None else one_by_one(policy.engine)
        stored = None if config.reuse is None else StoredProfile(Path(config.reuse))
        if stored is not None:
            engine = config.device.engine.name
            stored.check_draws(policy.identity, config.profile.sampling, config.profile.seed, engine)
        judge = Judge(verifier, config.profile, stored)
        sampler = Sampler(answer, policy.renderer, config.profile.sampling, config.profile.seed, stored)
        yield Profiler(config, policy, sampler, judge, {**policy.identity, "verifier": judge.name})


# waves of candidates


def work(
    log: WaveLog,
    items: Iterator[T],
    total: int,
    size: int,
    make: Callable[[Sequence[T]], Wave],
    *,
    learn: Callable[[Wave], object] = lambda wave: None,
    what: str = "profile",
    noun: str = "candidates",
) -> None:
    """Compute the waves of `size` items that are not in the log: `make` turns a batch of items into a wave, in order.
    `learn` gets every wave in order, including those of a killed run."""
    for wave in log:
        learn(wave)
    done = min(log.finished * size, total)
    if done:
        notice(f"resuming an interrupted run: {done} of {total} {noun} are done")
    rest = itertools.islice(items, log.finished * size, None)
    with progress((), what, total=total, initial=done) as bar:
        try:
            for batch in iter(lambda: list(itertools.islice(rest, size)), []):
                log.append(wave := make(batch))
                learn(wave)
                bar.update(min(size, total - bar.n))
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
        hint = "look at the verifier" if UNJUDGED in found.unscored else remedy(found.unscored)
        problem = f"no rollout has a reward ({counted})"
        raise InputError(problem, path=header["config"]["traces"], hint=f"{hint}; nothing was written")
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


# `--published`: the pass rates of a published pivot data set as a profile. They are those of the publisher's model,
# sampling and verifier. So the profile names none of the user's, and training on pivots that were selected from it
# needs `--allow-stale`.

NO_RATE = "no_pass_rate_with_its_number_of_rollouts"


def write_published(config: ProfileStageConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the profile; returns its summary. Candidates of traces without a pass rate are counted as
    `NO_RATE`. Raises `InputError` where no trace has one, and where another profile lies there, unless `overwrite`."""
    if config.verifier == parts.DEFAULT:  # the rule that the published rates were made with
        config = replace(config, verifier=Part("nemo"))
    config = parts.resolved(config)
    surveyed = survey(config.traces, config.split)
    skipped = Counter(surveyed.skipped)
    rows = list(_rows(config, surveyed.draw(config.limit, config.profile.seed), skipped))
    if not rows:
        hint = "import a published pivot data set (docs/pivots.md), or profile with a policy"
        raise InputError("record no pass rate", path=config.traces, hint=hint)
    found = ProfileSummary(max(row["rollouts"] for row in rows), None)
    for row in rows:
        found.add({"stop": "K reached", "certainty": 1.0, "faults": {}, "truncated": 0, **row})
    summary = found.summary(skipped)
    header = {
        "config": to_mapping(config),
        **dict.fromkeys(POLICY, PUBLISHED),
        "verifier": PUBLISHED,
        "traces_hash": surveyed.traces_hash,
        "summary": summary,
    }
    require_same_profile(out, header, overwrite=overwrite)
    PROFILE.write(out, header, rows)
    return {"path": str(out), **summary}


def _rows(config: ProfileStageConfig, chosen: Collection[int], skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    places = itertools.count()
    for trace in read_traces(config.traces, config.split):
        rewards = _rewards(trace, config.traces)
        for state in candidates(trace):
            if next(places) not in chosen:
                continue
            if rewards is None:
                skipped[NO_RATE] += 1
            else:
                kind = action_kind(state.demonstration)
                row = {"trace_id": state.trace_id, "turn": state.turn, "kind": kind, **rates(rewards)}
                yield {**row, "actions": [], "cost": NO_COST.counts()}


def _rewards(trace: Trace, path: str) -> list[float] | None:
    """The rewards of the rollouts behind a pass rate: `pass_rate_passed` (or the rate times their number) of
    `pass_rate_total`, else the recorded `rewards`. Raises `InputError` for values that are no pass rate."""
    keys = ("pass_rate", "pass_rate_total", "rewards", "pass_rate_passed")
    rate, total, rewards, passed = (trace.meta.get(key) for key in keys)
    total, passed = (int(n) if isinstance(n, float) and n.is_integer() else n for n in (total, passed))
    if total is None and rewards is None:
        return None
    if isinstance(rate, int | float) and type(total) is int and 1 <= total <= MOST_ROLLOUTS and 0 <= rate <= 1:
        passed = round(rate * total) if passed is None else passed
        if type(passed) is int and 0 <= passed <= total:
            return [1.0] * passed + [0.0] * (total - passed)
    elif (
        isinstance(rewards, list) and rewards and all(isinstance(one, int | float) and 0 <= one <= 1 for one in rewards)
    ):
        return [float(one) for one in rewards]
    if rate is None and rewards is None:
        return None
    problem = f"of trace {trace.id!r} are not a pass rate ({rate!r} of {total!r})"
    raise InputError(problem, path=path, field="meta", hint="pass_rate in [0, 1] with pass_rate_total, or rewards")
