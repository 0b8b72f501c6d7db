"""The environment `gateway:COMMAND`: tasks that an agent works on by itself, through a gateway in front of the policy.

For every rollout the gateway opens a session and the command is started in a folder of its own. It finds there the
server and its key (OPENAI_BASE_URL, OPENAI_API_KEY, and the same for ANTHROPIC), its task (TURNTREE_TASK, a JSON file),
and where to post a reward (TURNTREE_REWARD_URL, TURNTREE_REWARD_KEY). The reward is the one that is posted, else that
in the last line of its standard output. An agent that crashes, takes too long or gives no reward is censored.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.config import Above0, Bounded, Positive
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import Environment, Observation, Renderer, StreamingEngine
from turntree.core.verdict import Verdict, succeeded
from turntree.env.adapted import named, rows_of
from turntree.env.tasks import TRAIN, TaskSet, contents
from turntree.gateway.calls import Call, Session, Thoughts, digest_of
from turntree.gateway.config import GatewayLimits, ServingConfig, last_words
from turntree.gateway.merge import Merged, merge
from turntree.gateway.process import Exit, command_of, run_agent, variables_of
from turntree.gateway.sampling import EngineDriver, LiveSession, Sampler
from turntree.gateway.server import Gateway, Served, serving
from turntree.gateway.sessions import Sessions
from turntree.gateway.stepped import AgentPool, Dialogue, Relay, SteppedAgent
from turntree.rollout.accounting import Usage
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import Ending, ended, judged
from turntree.rollout.players import PlayedTask
from turntree.rollout.rewards import OF_THE_ENVIRONMENT, RewardSum
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.run.files import tree_hash, write_json

_MODEL = "policy"
_SILENT = 4  # groups without any answer, after which the command is at fault and not their tasks


@dataclass(frozen=True, kw_only=True)
class AgentTasks(Bounded):
    """The tasks of an agent."""

    argument: str | None
    tasks: str | None = None
    """A JSONL file: one task a row, given to the agent as it is. Default: numbered tasks, each with a seed."""
    held_out: str | None = None
    """A second such file for held-out tasks (default: shares of `tasks`)."""
    seconds: Above0 = 600.0
    """An agent that takes longer is stopped; its rollout has no reward."""
    agents: Positive = 8
    """Agents that run at once."""
    thoughts: Thoughts = "fork"
    """An answer that comes back without its reasoning: a fork, or keep the sampled thoughts in the context."""
    limit_reward: float | None = None
    """Reward of a session that used up its calls or its context and was given none (default: it has none)."""
    folder: str | None = None
    """Where the agents' folders are made and stay (default: they are removed)."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        command = command_of(named(self.argument, "gateway:COMMAND"))
        player = partial(AgentPlayer, self, command)
        tasks = {
            split: [
                AgentTask(name, {**row, "split": split}, player, task_type=kind if isinstance(kind, str) else None)
                for name, row in self._rows(split, count, seed)
                for kind in (row.get("type"),)
            ]
            for split, count in splits.items()
        }
        files = contents({"tasks": self.tasks, "held_out": self.held_out})
        words = [(i, Path(word)) for i, word in enumerate(command) if word != sys.executable]
        code = {f"command.{i}": tree_hash(word) for i, word in words if word.is_file()}  # what the agent does
        yield TaskSet(tasks=tasks, contents={**files, **code})

    def _rows(self, split: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
        if self.tasks is not None:
            rows = rows_of(self.tasks, self.held_out, split, count, seed)
            return _named(rows, self.tasks if split == TRAIN or self.held_out is None else self.held_out)
        made = [(f"{split}/{i}", seeds.derive(seed, "agent task", split, i) % 2**31) for i in range(count)]
        return [(name, {"seed": number}) for name, number in made]


@dataclass(frozen=True)
class AgentTask(PlayedTask):
    """A task (protocol `Environment`) that only its `player` can play."""

    replays = True

    task_id: str
    row: dict[str, Any]
    player: Any
    tools: tuple[dict[str, Any], ...] = ()
    task_type: str | None = None

    def refusal(self) -> InputError:
        problem = "is an agent that plays by itself, and this command steps environments"
        return InputError(problem, field="environment", hint="use it with train online or evaluate")


@dataclass(eq=False)
class _Group:
    index: int
    task: AgentTask
    begun: float
    rollouts: list[concurrent.futures.Future[Session]]

    @property
    def over(self) -> bool:
        return all(rollout.done() for rollout in self.rollouts)


def _running(live: Iterable[_Group]) -> list[concurrent.futures.Future[Session]]:
    return [rollout for group in live for rollout in group.rollouts if not rollout.done()]


class AgentPlayer:
    """`rollout.players.Player`: starts the agent once for every rollout, many at a time, and merges each task's
    sessions into its tree."""

    def __init__(
        self,
        settings: AgentTasks,
        command: list[str],
        engine: StreamingEngine,
        renderer: Renderer,
        config: SchedulerConfig,
        rewards: RewardSum | None,
        **deciding: Any,
    ) -> None:
        episodes, self._deciding = config.episodes, deciding
        self._settings, self._command, self._engine, self._renderer = settings, command, engine, renderer
        self._config, self._rewards = config, rewards
        self._places = min(settings.agents, config.places)
        self._serving = ServingConfig(
            sampling=episodes.sampling,
            max_context=episodes.max_context,
            thoughts=settings.thoughts,
            retries=config.max_retries,
            limits=GatewayLimits(calls=episodes.max_turns, seconds=2 * settings.seconds + 60),
        )
        self.usage, self.rendered, self._silent = Usage(places=self._places), False, list[str]()
        self._told = False

    def run(
        self, tasks: Iterable[Environment], *, seed: int, iteration: int = 0, begun: Counter[str] | None = None
    ) -> Iterator[GrownGroup]:
        """Yields each task once, in order. The seeds of sessions depend on (seed, iteration, task, sample) only."""
        begun, started = Counter[str]() if begun is None else begun, time.perf_counter()
        if self._deciding:
            yield from self._stepped(tasks, seed, iteration, begun)
            return
        try:
            with contextlib.ExitStack() as held:
                playing = held.enter_context(self._serve(Sampler))
                pool = concurrent.futures.ThreadPoolExecutor(self._places, thread_name_prefix="turntree-agent")
                held.callback(pool.shutdown, cancel_futures=True)
                held.callback(playing.stop.set)  # leaving the block stops every agent
                live = list[_Group]()
                for index, task in enumerate(tasks):
                    assert isinstance(task, AgentTask)
                    own = seeds.again(seed, iteration, begun[task.task_id])
                    begun[task.task_id] += 1
                    rollouts = [pool.submit(playing.play, task, i, own) for i in range(self._config.group_size)]
                    live.append(_Group(index, task, time.perf_counter(), rollouts))
                    while len(_running(live)) >= self._places:
                        yield from self._over(live)
                while live:
                    yield from self._over(live)
                self._require_answered(groups=1)
        finally:
            self.usage.seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def _serve(self, sampler: type[Sampler]) -> Iterator[_Playing]:
        """A gateway for agents while the block lasts."""
        with contextlib.closing(EngineDriver(self._engine)) as driver, _folder(self._settings.folder) as folder:
            sessions = Sessions(driver, self._renderer, self._serving, sampler=sampler)
            gateway = Gateway(sessions, model=_MODEL, admin_key=secrets.token_urlsafe(24))
            with serving(gateway.app, most=self._serving.limits.connections) as served:
                yield _Playing(self, sessions, served, folder, threading.Event())

    def _stepped(
        self, tasks: Iterable[Environment], seed: int, iteration: int, begun: Counter[str]
    ) -> Iterator[GrownGroup]:
        """With a gate or a brancher the scheduler plays the agents, which it steps as environments."""
        config = replace(self._config, max_live_rollouts=self._places)
        with self._serve(Relay) as playing, AgentPool(self._places) as pool:
            relay, numbers = playing.sessions.sampler, itertools.count()
            assert isinstance(relay, Relay)

            def plays(task: AgentTask, number: int, dialogue: Dialogue) -> Session:
                opened = partial(relay.attend, dialogue)
                return replace(playing, stop=dialogue.stop).play(task, number, seed, opened)

            scheduler = Scheduler(
                self._engine, self._renderer, config, pool=pool, rewards=self._rewards, **self._deciding
            )
            scheduler.usage, scheduler.rendered = self.usage, self.rendered
            stepped = (SteppedAgent(task, plays, numbers, []) for task in tasks)
            for group in scheduler.run(stepped, seed=seed, iteration=iteration, begun=begun):
                reason = next(iter(group.rewards.verdicts.values())).reason
                self._over_with(group.task, bool(group.tree.starts()), reason)
                yield group
            self._require_answered(groups=1)

    def _over(self, live: list[_Group]) -> Iterator[GrownGroup]:
        """The groups that are to be given, in order, after at least one more rollout has ended."""
        if running := _running(live):
            concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        while live and live[0].over:
            yield self._grown(live.pop(0))

    def _grown(self, group: _Group) -> GrownGroup:
        """The finished group. Reward functions judge its sessions here, together and in the consumer's thread."""
        sessions, seconds = [rollout.result() for rollout in group.rollouts], time.perf_counter() - group.begun
        answered = any(call.completion for session in sessions for call in session.calls)
        self._over_with(group.task, answered, sessions[0].reason)
        tools = next((call.tools for session in sessions for call in session.calls if call.tools), ())
        task = replace(group.task, tools=tools)  # what its prompts showed
        merged = merge(task.task_id, sessions)
        if (left_out := len(merged.tree.untrained())) and not self._told:
            self._told = True
            notice(f"answers under a grammar are not trained (first: {left_out} of task {task.task_id!r})")
        [judgement] = judged([_endings(task, sessions, merged)], self._rewards)
        rewards = replace(judgement, completions=merged.rewards.completions)
        rewards.check(merged.tree)
        return GrownGroup(index=group.index, task=task, tree=merged.tree, rewards=rewards, seconds=seconds)

    def _over_with(self, task: Environment, answered: bool, reason: str) -> None:
        """Note whether the agents of a group that is over were answered."""
        self.rendered = self.rendered or answered
        if not answered:
            self._silent.append(f"no agent of task {task.task_id!r} asked a model and was answered: {reason}")
            self._require_answered(groups=_SILENT)

    def _require_answered(self, *, groups: int) -> None:
        """Raise `InputError` where so many groups ended and none ever had an answer: the command does not work. One
        group may be a task that is broken."""
        if not self.rendered and len(self._silent) >= groups:
            hint = "run the command by hand against turntree gateway"
            raise InputError(self._silent[0], field="environment", hint=hint)


def _endings(task: AgentTask, sessions: Iterable[Session], merged: Merged) -> dict[int, Ending]:
    """How each leaf with a verdict ended; those at which a session ended with a reward have its episode."""
    by_end = {merged.ends[session.session_id]: session for session in sessions}
    found: dict[int, Ending] = {}
    for leaf, verdict in merged.rewards.verdicts.items():
        stop = merged.tree.stop_reason(leaf)
        assert stop is not None
        found[leaf] = Ending(stop, verdict)
        if leaf in by_end and verdict.reward is not None:
            found[leaf] = ended(stop, verdict, task, *_said(by_end[leaf], merged, leaf, verdict))
    return found


def _said(session: Session, merged: Merged, end: int, verdict: Verdict) -> tuple[list[Message], list[Observation]]:
    """All that was said in the calls of the rollout that ended at `end`, in order, and what each call was told before
    it; the last observation is empty and has the verdict."""
    messages, told, seen = list[Message](), list[Observation](), Counter[bytes]()
    mine = set(merged.tree.nodes_of(end))
    for call in session.calls:
        node = merged.nodes.get((session.session_id, call.call_id))
        if node not in mine:
            continue  # without an answer, or left out
        new, answer = _new(call, seen), merged.tree[node].messages
        seen.update(digest_of(message, thoughts=False) for message in (*new, *answer))
        told.append(Observation(new, done=False))
        messages += (*new, *answer)
    return messages, [*told, Observation((), done=True, success=verdict.success, reward=verdict.reward)]


def _new(call: Call, seen: Counter[bytes]) -> tuple[Message, ...]:
    """What a prompt says that was not said before. A history that was rewritten repeats much of it."""
    if call.cause in ("start", "continue"):
        return call.added
    left, new = seen.copy(), list[Message]()
    for message in call.messages:
        name = digest_of(message, thoughts=False)
        left[name] -= 1
        new += [message] if left[name] < 0 else []
    return tuple(new)


@dataclass(frozen=True)
class _Playing:
    """What the rollouts of one run share."""

    player: AgentPlayer
    sessions: Sessions
    served: Served
    folder: Path
    stop: threading.Event

    def play(
        self, task: AgentTask, sample: int, seed: int, opened: Callable[[LiveSession], None] | None = None
    ) -> Session:
        """One rollout: a session with the agent's own word on what it is worth."""
        name = f"{seeds.derive(seed, 'agent', task.task_id, sample):016x}"
        opening = self.sessions.open(task.task_id, seed=seed, sample=sample, session_id=name)
        live, keys = self.served.call(opening)
        if opened is not None:
            opened(live)
        # a held-out check, a greedy evaluation or a resumed run plays a session again, whose folder may have been kept
        folder = Path(tempfile.mkdtemp(prefix=f"{live.session_id}.", dir=self.folder))
        write_json(folder / "task.json", {"id": task.task_id, **task.row})
        settings, variables = self.player._settings, variables_of(self.served.url, live.session_id, keys, _MODEL)
        variables = {**variables, "TURNTREE_TASK": str(folder / "task.json")}
        exit_ = run_agent(self.player._command, folder, variables, settings.seconds, self.stop)
        session = self.served.call(self.sessions.close(live, exit_.problem or ""))
        ended = self._judged(session, live, exit_)
        if settings.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        return ended

    def _judged(self, session: Session, live: LiveSession, exit_: Exit) -> Session:
        """The session with its worth. A posted reward counts whatever becomes of the agent afterwards, one in its
        output only if it ended well."""
        if self.sessions.driver.failure is not None:
            raise self.sessions.driver.failure
        if live.reward is not None:
            success = succeeded(session.success, session.reward)
            return replace(session, success=success, reason=session.reason or "posted")
        problem = exit_.problem
        if problem is None:
            try:
                said = last_words(exit_.last_line, [call.call_id for call in session.calls])
            except InputError as error:
                problem = f"the agent gave no reward: none was posted, and {error}"
            else:
                success, reason = succeeded(said.success, said.reward), said.reason or "the agent's last line"
                by_call = said.call_rewards or {}
                return replace(session, reward=said.reward, success=success, reason=reason, call_rewards=by_call)
            functions = () if self.player._rewards is None else self.player._rewards.functions
            if functions and not any(one.function in OF_THE_ENVIRONMENT for one in functions):  # theirs takes its place
                return replace(session, reward=0.0, success=None, reason="the agent ended")
        ended = exit_.stopped is None and 0 <= exit_.code < 126  # shells say 126 and more for what was killed
        if live.limit and ended and self.player._settings.limit_reward is not None:
            reason = f"{live.limit} ({problem})"
            return replace(session, reward=self.player._settings.limit_reward, success=False, reason=reason)
        return replace(session, reward=None, reason=f"{problem} ({live.limit})" if live.limit else problem)


def _named(rows: list[tuple[str, dict[str, Any]]], where: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows by their own `id` where they have one. Raises `InputError` for an id of two rows."""
    named = [(name if row.get("id") is None else str(row["id"]), row) for name, row in rows]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise InputError(f"two rows have the id {twice[0]!r}", path=where, field="id", hint="give every task its own")
    return named


@contextlib.contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is not None:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="turntree-agents-", ignore_cleanup_errors=True) as made:
        yield Path(made)
