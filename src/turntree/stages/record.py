"""`turntree traces record`: tasks of any environment and a policy in, traces of its episodes out.

Tasks are played in waves of fixed membership, each of which is logged when it is done: a killed recording resumes with
its unfinished wave. Every trace records how its task is rebuilt (`env.tasks.environment_record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.protocols import Environment, Teacher, task_of
from turntree.core.verdict import Verdict
from turntree.env.tasks import TaskSet, environment_record, identity, open_tasks
from turntree.rollout.groups import GrownGroup
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.rollout.teachers import FAILED, NO_LABEL, labelled
from turntree.run.files import require_table
from turntree.run.wave_log import WaveLog, open_log
from turntree.stages.config import RecordConfig
from turntree.stages.policy import Speaker, open_speaker, policy_name
from turntree.stages.profile import Wave, work
from turntree.traces.schema import FILE_SCHEMA, Trace, write_traces

_ERROR = "error:"  # how a tool's answer begins when the call failed


def record_traces(config: RecordConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Play and write `out`; returns what was counted. Episodes that failed (of the environment or the engine) are
    counted by reason and never written.

    A killed recording resumes when it is started again, and ends with the same file. Raises `InputError` where
    the interrupted one was another, unless `overwrite`, and where no episode is kept.
    """
    if not overwrite:
        require_table(out, FILE_SCHEMA)
    config = parts.resolved(config)
    model = config.model if config.endpoint else policy_name(config.model, config.environment)
    splits = {config.split: config.count}
    with (
        open_tasks(config.environment, splits, seed=config.task_seed, model=model, workers=config.workers) as opened,
        open_speaker(model, config.endpoint, config.device) as speaker,
    ):
        tasks = opened.of(config.split)
        made_from = {**speaker.identity, **identity(config.environment, opened)}
        described = {"config": to_mapping(config), **made_from}
        settings = {**described, "code": parts.identities(config)}
        with open_log(out.with_name(f"{out.name}.waves"), settings, overwrite=overwrite) as log:
            work(
                log,
                iter(tasks),
                len(tasks),
                config.wave,
                lambda members: _played(members, opened, speaker, config, model),
                what="traces record",
                noun="tasks",
            )
            return _write(log, {"made_by": "record", **described}, out)


def _played(
    members: Sequence[Environment], opened: TaskSet, speaker: Speaker, config: RecordConfig, model: str
) -> Wave:
    """One wave: its traces as JSON, and what was counted."""
    teacher = None if config.teacher is None else parts.build("teachers", config.teacher)
    speaker.engine.clear_cache()  # a wave must not depend on earlier waves, because a resumed run has not computed them
    settings = SchedulerConfig(episodes=config.episodes, group_size=config.samples)
    scheduler = Scheduler(speaker.engine, speaker.renderer, settings, pool=opened.pool)
    counts: Counter[str] = Counter()
    traces: list[Trace] = []
    for group in scheduler.run(members, seed=config.seed):
        traces += kept_episodes(group, config, model, teacher, counts)[0]
    return {"traces": [trace.to_json() for trace in traces], "counts": dict(counts)}


_TASKS = 4  # that tell a teacher which is down from a task that it cannot label


def _require_labels(counts: Counter[str]) -> None:
    """Raises `InputError` where the teacher failed at every state of several tasks: its server is down, or its code is
    wrong. One task may fail for a reason of its own."""
    failed = Counter({why: n for why, n in counts.items() if why.startswith(f"dropped turn: {NO_LABEL}: {FAILED}")})
    if counts["tasks"] >= _TASKS and failed.total() == counts["turns"] > 0:
        reason = failed.most_common(1)[0][0].partition(f"{FAILED} ")[2]
        problem = f"failed at each of the first {counts['turns']} states: {reason}"
        hint = "mend it; `traces record` goes on where it stopped, `train` needs --overwrite"
        raise InputError(problem, field="teacher", hint=hint)


def kept_episodes(
    group: GrownGroup, config: RecordConfig, model: str, teacher: Teacher | None, counts: Counter[str]
) -> tuple[list[Trace], Cost]:
    """The episodes of one task that are kept, and what their labels cost; every one is counted."""
    counts["tasks"] += 1
    kept, cost = list[Trace](), NO_COST
    for sample, leaf in enumerate(group.tree.ends()):
        verdict = group.rewards.verdicts[leaf]
        counts["episodes"] += 1
        reason = _dropped(verdict, config)
        if reason is not None:
            counts[f"dropped: {reason}"] += 1
            continue
        trace = _trace_of(group, sample, leaf, verdict, config, model)
        if teacher is not None:
            trace, told, spent = labelled(trace, group.task, teacher)
            cost += spent
            counts.update({f"dropped turn: {reason}": count for reason, count in told.items()})
        counts.update(
            traces=1,
            turns=len(trace.turn_positions),
            successes=int(trace.success is True),
            tool_errors=trace.meta["tool_errors"],
        )
        kept.append(trace)
    _require_labels(counts)
    return kept, cost


def _dropped(verdict: Verdict, config: RecordConfig) -> str | None:
    """Why an episode is not written; None if it is."""
    if verdict.reward is None:
        return f"failed ({verdict.reason})"
    if config.only == "successes" and not verdict.success:
        return "not a success"
    return None


def _trace_of(group: GrownGroup, sample: int, leaf: int, verdict: Verdict, config: RecordConfig, model: str) -> Trace:
    """The episode that ended at `leaf`."""
    task = group.task
    nodes = map(group.tree.__getitem__, group.tree.nodes_of(leaf))  # also where its context was rewritten
    messages = tuple(message.in_whole_characters() for node in nodes for message in node.messages)
    spoken = [message for message in messages if message.role == "assistant"]
    cut = {str(turn): "cut" for turn, message in enumerate(spoken) if message.cut}
    task_type = task_of(task).task_type
    meta: dict[str, Any] = {
        "group": task.task_id,
        "reward": verdict.reward,
        "ended": verdict.reason,
        "tool_errors": sum(message.role == "tool" and message.content.startswith(_ERROR) for message in messages),
        **({"task_type": task_type} if task_type else {}),
        **({"skip_turns": cut} if cut else {}),
    }
    return Trace(
        id=f"{task.task_id}/{sample}",
        messages=messages,
        tools=tuple(task.tools),
        domain=config.environment.name,
        split=config.split,  # pyright: ignore[reportArgumentType] # checked by the configuration
        success=verdict.success,
        environment=environment_record(
            config.environment, config.split, config.count, config.task_seed, task.task_id, model
        ),
        meta=meta,
    )


def _write(log: WaveLog, header: dict[str, Any], out: Path) -> dict[str, Any]:
    """The traces of all waves; the log has then done its work."""
    counts = Counter[str]()
    for wave in log:
        counts.update(wave["counts"])
    if not counts["traces"]:
        log.remove()
        found = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
        hint = "play more tasks, or allow longer episodes (--max-turns, --max-tokens)"
        raise InputError(f"no episode is kept ({found})", hint=hint)
    traces = (Trace.from_json(row) for wave in log for row in wave["traces"])
    write_traces(out, traces, {**header, "counts": dict(counts), "traces": counts["traces"]})
    log.remove()
    return {"path": str(out), **counts}
