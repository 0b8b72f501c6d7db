"""`turntree train pivot`: selected states and their policy in, a post-trained policy out (PivotRL, Algorithm 1)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.completion import Sampling
from turntree.core.config import Part, from_mapping, to_mapping, to_value
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import action_kind
from turntree.core.progress import notice
from turntree.core.protocols import Renderer, TurnState, TurnVerifier
from turntree.core.tree import RolloutTree
from turntree.logs import trees
from turntree.logs.groups import action_text
from turntree.logs.trees import KeptTree
from turntree.rollout.cluster.pool import WorkerPool
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import (
    PATH_TOO_LONG,
    Limits,
    Prompted,
    judge_demonstrated,
    occurrences_of,
    rule_name,
    sample_local,
    score_wave,
    that_fit,
)
from turntree.rollout.spread import labelled
from turntree.run import loggers
from turntree.run.artifacts import POLICY, policy_of
from turntree.run.files import file_hash
from turntree.run.folder import HELD_OUT, RunDirectory, open_run
from turntree.run.means import mean_by_kind
from turntree.stages.candidates import SelectedState, read_candidates, read_selected, traces_of
from turntree.stages.config import TrainPivotConfig
from turntree.stages.gradients import reasons, require_rewards
from turntree.stages.held_out import SuccessCheck, TrainedOn, open_held_out
from turntree.stages.own_path import open_own_path
from turntree.stages.policy import Policy, Speaker, load_policy, open_reference
from turntree.stages.training import on_ranks, run_algorithm
from turntree.stages.verifier import chosen_verifier, open_verifier
from turntree.stages.workers import Published, open_crew, results
from turntree.traces.schema import read_traces
from turntree.train.loop import Check, Checked, Row
from turntree.train.pivot import Pivot, PivotGroup, PivotRL, draw_local
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.success import moved_kinds

_STATES = 8  # that a worker plays in one batch


@on_ranks
def run_train_pivot(
    config: TrainPivotConfig, out: Path, *, overwrite: bool = False, group: ProcessGroup = SINGLE
) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, that of the highest held-out success in `out/best`, the curves in
    `out/metrics.jsonl`, the groups of every step in `out/trees.jsonl`, outcomes of held-out tasks in
    `out/held_out.jsonl`, the cost in `out/cost.json`. An unfinished run of the same configuration and contents in `out`
    is resumed; any other is refused unless `overwrite`."""
    config = parts.resolved(config)
    loggers.check(config.loggers)
    selected = None if config.pivots is None else read_selected(config.pivots, config.traces)
    policy = load_policy(config.model, config.device)
    reference, pulls = open_reference(config, policy)
    given = _given(config, policy, selected)
    longest = min(policy.engine.max_context, config.train.max_tokens)
    shared = policy.trains_on_trees(longest, field="train.max_tokens", ranks=group.size, reference=reference)
    with contextlib.ExitStack() as stack:
        verifier = stack.enter_context(open_verifier(given.verifier, config.environment))
        if given.header is not None:
            _require_verifier(config, given.header, verifier)
        own = stack.enter_context(open_own_path(config, policy, verifier, out / "own"))
        tasks = stack.enter_context(open_held_out(config.check, trained_on(config, given.traces, given.split), policy))
        inputs = {
            **policy.identity,
            **pulls,
            **parts.identities(config),
            **given.hashes,
            "verifier": verifier.name,
            **({} if own is None else own.identity),
            **({} if tasks is None else {"check": tasks.identity}),
        }
        logs = (trees.FILE_NAME, HELD_OUT)
        run = stack.enter_context(
            open_run(out, "train pivot", to_mapping(config), inputs, overwrite=overwrite, logs=logs)
        )
        crew = stack.enter_context(open_crew(__name__, config, policy, verifier=to_value(given.verifier)))
        draw = None if crew is None else partial(_drawn, crew, Published(crew, policy))
        learner = policy.trainee(shared, group, reference)
        algorithm = PivotRL(learner, config.train, given.pivots, verifier, own=own, draw=draw)
        success = None if tasks is None else SuccessCheck(run, policy, tasks, algorithm)
        trained = run_algorithm(
            run,
            policy,
            algorithm,
            config,
            shown={"reward": "reward_mean", "KL": "kl"},
            keep=partial(_keep, run, config),
            check=_check(config, policy, verifier, given.traces, success),
        )
        rows = run.metrics()
        require_rewards(rows)
    last = rows[-1]
    return {
        "model": str(run.model),
        "states": len(algorithm.pivots),
        "dropped": dict(sorted(given.dropped.items())),
        "searches": [row["own_path"] for row in rows if "own_path" in row],
        "steps": last["step"],
        "reward_mean": last["reward_mean"],
        "kl": last.get("kl"),
        "kinds": moved_kinds(rows),
        "censored": reasons(rows),
        "rollouts": sum(row.get("rollouts", 0) for row in rows),
        "cost": trained.cost.counts(),
        "success": None if success is None else success.result(config.model),
        "stopped": trained.stopped,
    }


def trained_on(config: TrainPivotConfig, traces: str, split: str = "") -> TrainedOn:
    """What the held-out tasks depend on. The policy plays training tasks where it trains on its own states."""
    plays, train = config.states != "expert", config.train
    return TrainedOn(
        EpisodeConfig(sampling=train.sampling, max_context=train.max_tokens, cut_turns=train.cut_turns),
        config.environment,
        partial(read_traces, traces, split) if traces else tuple,
        tasks=config.own.count if plays else 0,
        task_seed=config.task_seed,
        turns=config.own.max_turns if plays else 0,
    )


@dataclass(frozen=True)
class _Given:
    """What training begins with: the verifier, and what a pivots file holds, where there is one."""

    verifier: Part
    header: dict[str, Any] | None = None
    traces: str = ""
    split: str = ""  # of the traces ("": all)
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    pivots: Sequence[Pivot] = ()
    dropped: Counter[str] = field(default_factory=Counter[str])  # states that cannot be trained on, by reason


def _given(
    config: TrainPivotConfig, policy: Policy, selected: tuple[dict[str, Any], list[SelectedState]] | None
) -> _Given:
    """The states of the pivots file; without one every candidate of the traces (D_cand), or nothing where the policy
    makes its states itself."""
    if config.pivots is not None and selected is not None:
        header, states = selected
        if not config.allow_stale:
            _require_profiled_alike(config, header, policy)
        verifier = chosen_verifier(config.verifier, header, config.pivots)
        traces, split = config.traces or traces_of(header, config.pivots), str(header["split"])
        if config.check.states and split != "train":
            problem = f"would be looked at in the turns that are trained on: the pivots are of split {split or 'all'!r}"
            raise ConfigError(problem, field="check.states", hint="profile the split train, or set it to 0")
        hashes = {"pivots_hash": file_hash(Path(config.pivots)), "traces_hash": str(header["traces_hash"])}
    else:
        assert config.verifier is not None  # the configuration refuses it without one
        header, verifier, traces, split = None, config.verifier, config.traces, "train"
        if config.states == "own" or traces is None:
            return _Given(verifier)
        drawn = read_candidates(traces, split, 0, config.train.seed)
        alike = {"role": "random", "weight": 1.0}
        states = [SelectedState({"kind": action_kind(s.demonstration), **alike}, s, "") for s in drawn]
        hashes = {"traces_hash": file_hash(Path(traces))}
    pivots, dropped = _pivots(states, policy, config)
    return _Given(verifier, header, traces, split, hashes, pivots, dropped)


CONFIG = TrainPivotConfig


@contextlib.contextmanager
def open_player(
    config: TrainPivotConfig, policy: Policy | Speaker, settings: dict[str, Any]
) -> Iterator[Callable[[Any], Any]]:
    """What a worker of this stage plays a unit with (`stages.workers`)."""
    source = Part.from_value(settings["verifier"], "verifier")
    with open_verifier(source, config.environment) as verifier:

        def play(unit: dict[str, Any]) -> list[dict[str, Any]]:
            drawn = draw_local(
                unit["prompted"],
                policy.engine,
                policy.renderer,
                verifier,
                config.train,
                unit["seed"],
                unit["occurrences"],
            )
            return [labelled(*each) for each in drawn]

        yield play


def _drawn(
    crew: WorkerPool, weights: Published, prompted: Sequence[Prompted], seed: int
) -> list[tuple[RolloutTree, Rewards]]:
    """The groups of a wave, by the workers."""
    occurrences, now = occurrences_of(prompted), weights()
    slices = [slice(start, start + _STATES) for start in range(0, len(prompted), _STATES)]
    units = [
        (
            {**now, "seed": seed, "prompted": prompted[part], "occurrences": occurrences[part]},
            [item.state.id for item in prompted[part]],
        )
        for part in slices
    ]
    return [group for groups in results(crew, units) for group in groups]


def _keep(
    run: RunDirectory,
    config: TrainPivotConfig,
    step: int,
    groups: Sequence[PivotGroup],
    credits: Sequence[Credit | None],
) -> None:
    """Append the trees of a step that is kept."""
    if not trees.is_kept(step, config.train.steps, config.keep_trees):
        return
    kept = [
        KeptTree(
            id=f"{step}.{number}",
            iteration=step,
            tree=group.tree,
            rewards=group.rewards,
            credit=credit,
            task_type=group.pivot.kind,
            tools=tuple(group.pivot.prompted.state.tools),
            meta={"role": group.pivot.role, "demonstrated": action_text(group.pivot.prompted.state.demonstration)},
        )
        for number, (group, credit) in enumerate(zip(groups, credits, strict=True))
    ]
    run.append(trees.FILE_NAME, (tree.to_json() for tree in kept))


def _pivots(
    selected: Sequence[SelectedState], policy: Policy, config: TrainPivotConfig
) -> tuple[list[Pivot], Counter[str]]:
    """The selected states that can be trained on, and how many others there are by reason."""
    sampled = config.train.sampling.max_tokens
    limits = Limits(sampled, policy.engine.max_context, config.train.max_tokens, demonstrations=False)
    states, what = [one.state for one in selected], "states cannot be trained on"
    fitting, dropped = _fitting(states, policy.renderer, limits, what, path=config.pivots or config.traces)
    rows = [(item, selected[place].row) for place, item in fitting]
    return [Pivot(item, row["kind"], row["role"], row["weight"]) for item, row in rows], dropped


def _fitting(
    states: Sequence[TurnState], renderer: Renderer, limits: Limits, what: str, **place: Any
) -> tuple[list[tuple[int, Prompted]], Counter[str]]:
    """`that_fit`, which says how many are left out, and why. Raises `InputError` (its `place`) where all are."""
    fitting, dropped = that_fit(states, renderer, limits)
    if dropped:
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        told = f"{dropped.total()} of {len(states)} {what} ({counted})"
        longer = f"raise --set train.max_tokens={limits.path} for longer paths, which takes more memory"
        hint = longer if dropped[PATH_TOO_LONG] else "see turntree check model"
        if not fitting:
            raise InputError(told, hint=hint, **place)
        notice(f"{told}, and are left out; {hint}")
    return fitting, dropped


def _require_profiled_alike(config: TrainPivotConfig, header: dict[str, Any], policy: Policy) -> None:
    """Raise `InputError`, naming all differences, unless training begins with the policy and sampling of the
    profile."""
    profiled, trained = to_mapping(from_mapping(Sampling, header["sampling"])), to_mapping(config.train.sampling)
    if trained["max_tokens"] > profiled["max_tokens"] and not header["cut"]:
        profiled.pop("max_tokens")  # no rollout reached the limit, so a higher one changes nothing
    pairs = [(POLICY[key], there, policy.identity[key]) for key, there in policy_of(header).items()]
    pairs += [(key, value, trained[key]) for key, value in profiled.items()]
    differing = [f"{what} {there!r}, training {here!r}" for what, there, here in pairs if there != here]
    if differing:
        raise InputError(
            f"were not profiled with what training would sample: profile {'; profile '.join(differing)}",
            path=config.pivots,
            hint=f"profile again with {config.model!r} as it is trained (sampling: --set profile.sampling.KEY=VALUE in "
            "`turntree profile`, train.sampling.KEY here), or pass --allow-stale",
        )


def _require_verifier(config: TrainPivotConfig, header: dict[str, Any], verifier: TurnVerifier) -> None:
    """Raise `InputError` unless it is the profile's, or the strict baseline, or a stale profile is allowed."""
    name = rule_name(verifier, config.train.cut_turns)
    baseline = config.verifier is not None and config.verifier.name == "strict"
    if name != header["verifier"] and not baseline and not config.allow_stale:
        problem = f"were profiled with verifier {header['verifier']!r}, and training would use {name!r}"
        hint = "judge the profile's samples again (turntree rescore, then select), or pass --allow-stale"
        raise InputError(problem, path=config.pivots, hint=hint)


def _check(
    config: TrainPivotConfig, policy: Policy, verifier: TurnVerifier, traces: str, success: SuccessCheck | None
) -> Check | None:
    """`success`, with acceptance at held-out states of the traces, as many as can be sampled, where it is asked for."""
    if not config.check.states:
        return success
    states = read_candidates(traces, "dev", config.check.states, config.task_seed)
    context = policy.engine.max_context
    sampled = Limits(config.train.sampling.max_tokens, context, path=context, demonstrations=False)
    what = "held-out states cannot be sampled"
    prompted = [item for _, item in _fitting(states, policy.renderer, sampled, what, field="check.states")[0]]
    states = [item.state for item in prompted]
    kinds = [verdict.kind for verdict in judge_demonstrated(verifier, states)]

    def check(step: int, row: Row) -> Checked:
        grown = sample_local(
            prompted, policy.engine, policy.renderer, config.train.sampling, config.check.samples, seed=1
        )
        pairs = list(zip(grown, states, strict=True))
        rewards = score_wave(pairs, verifier, cut_turns=config.train.cut_turns, seed=1)
        cost = sum((*(tree.cost for tree in grown), *(each.cost for each in rewards)), NO_COST)
        scored = [(kind, r) for kind, labels in zip(kinds, rewards, strict=True) for r in labels.scored().values()]
        accepted = mean_by_kind([*scored, *(("all", reward) for _, reward in scored)])
        told = Checked({}) if success is None else success(step, row)
        return Checked({"held_out_acceptance": accepted, **told.figures}, cost + told.cost, told.stop)

    return check
