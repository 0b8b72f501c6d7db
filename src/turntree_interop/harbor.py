"""Harbor and Terminal-Bench: their tasks (`--environment harbor:FOLDER`) and their traces (ATIF, Terminus 1 and 2).

Every non-error tool call is a candidate; of a terminal agent, every bash action (PivotRL, appendix A.2).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import as_object, joined_text
from turntree.core.progress import notice
from turntree.core.scalars import number
from turntree.env.adapted import HELD_OUT, named, of_split
from turntree.env.container_shell import KILLED, ContainerShell, Ran
from turntree.env.container_tasks import ContainerTask, InContainers, Judged
from turntree.env.tasks import TRAIN
from turntree.run.files import tree_hash
from turntree.run.jsonl import placed, read_text, read_toml
from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    BrokenMessage,
    ChatRow,
    acts_in,
    answers,
    count_unknown,
    each_object,
    list_of,
    misfit,
    object_of,
    reasoning_in,
    told_by,
    words,
)
from turntree_interop.observed import calls_in
from turntree_interop.sharegpt import turns_of

_ATIF_KEYS = words(
    "schema_version session_id trajectory_id agent steps notes final_metrics extra continued_trajectory_ref "
    "subagent_trajectories reward"
)
_STEP_KEYS = words(
    "step_id timestamp source model_name reasoning_effort message reasoning_content tool_calls observation metrics "
    "extra is_copied_context llm_call_count"
)
COPIED, NO_MODEL, SUBAGENT = "copied_context", "no_model_call", "in_subagent_trajectory"
_CALL_KEYS = words("tool_call_id function_name arguments extra")
_TERMINALS = ("terminus", "mini-swe", "terminal")


def _is_atif(row: dict[str, Any]) -> str:
    version = str(row.get("schema_version", ""))
    return "" if version.startswith("ATIF") and "steps" in row else "no 'schema_version' ATIF beside 'steps'"


@told_by(_is_atif)
def read_atif(row: dict[str, Any]) -> ChatRow:
    """A trajectory in the Agent Trajectory Interchange Format, 1.0 to 1.7. Its outcome lies in another file.

    Steps that were copied from an earlier trajectory, or made without a model, are history. Sub-agents are left out and
    counted: their prompts do not tell the task, so their groups would not be that of the run.
    """
    version = str(row.get("schema_version", ""))
    if not version.startswith("ATIF-v1."):
        raise InputError(f"is {version!r}", field="schema_version", hint="versions 1.x are read")
    agent = object_of(row, "agent")
    name = str(agent.get("name", ""))
    chat = ChatRow.of(row, _ATIF_KEYS, id="trajectory_id session_id", told=row)
    chat.rule = "bash" if name.startswith(_TERMINALS) else "tool_calls"
    chat.meta = {"agent": name}
    chat.declare(agent, "tool_definitions")
    chat.ignored += Counter({"continued_trajectory_ref": 1} if row.get("continued_trajectory_ref") is not None else {})
    _count_subagents(row, chat)
    chat.messages = each_object(list_of(row, "steps", "a list of steps"), lambda step: _step(step, chat))
    return chat


def _count_subagents(row: dict[str, Any], chat: ChatRow) -> None:
    """Count the trajectories of sub-agents, those of their own sub-agents too, and the agent's turns in them."""
    for one in list_of(row, "subagent_trajectories", "a list of trajectories"):
        if not isinstance(one, dict):
            raise InputError(f"holds {type(one).__name__}, not an object", field="subagent_trajectories")
        inner = cast("dict[str, Any]", one)
        chat.ignored["subagent_trajectories[]"] += 1
        steps = list_of(inner, "steps", "a list of steps")
        turns = sum(isinstance(step, dict) and step.get("source") == "agent" for step in steps)
        chat.left_out += Counter({SUBAGENT: turns})
        _count_subagents(inner, chat)


def _step(step: dict[str, Any], chat: ChatRow) -> list[Any]:
    count_unknown(step, _STEP_KEYS, "steps[].", chat.ignored)
    source, content = step.get("source"), joined_text(step.get("message"), chat.ignored)
    results = list_of(object_of(step, "observation"), "results", "a list of results")
    if any(isinstance(one, dict) and one.get("subagent_trajectory_ref") is not None for one in results):
        chat.ignored["results[].subagent_trajectory_ref"] += 1
    screens = [{"role": "user", "content": one.get("content")} for one in results if isinstance(one, dict)]
    if source in ("system", "user"):
        return [{"role": source, "content": content}, *screens]
    if source != "agent":
        return [BrokenMessage(f"holds a step of source {source!r}", field="steps", hint="system, user or agent")]
    calls = list_of(step, "tool_calls", "a list of tool calls")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if step.get("is_copied_context") or step.get("llm_call_count") == 0:  # the policy did not sample it here
        message[SKIP] = COPIED if step.get("is_copied_context") else NO_MODEL
    message |= reasoning_in(step, chat.ignored)
    if not calls:  # raw content: the action is in the text, and the screen is what the user shows
        return [message | acts_in(content), *screens]
    named = "function_name tool_call_id"
    message["tool_calls"] = calls_in(calls, _CALL_KEYS, "steps[].tool_calls[].", chat.ignored, named)
    return [message, *_atif_answers(calls, results)]


def _atif_answers(calls: list[Any], results: list[Any]) -> list[Any]:
    """The results by their calls; a screen of no call answers all that are left."""
    left = [call.get("tool_call_id") for call in calls if isinstance(call, dict)]
    messages: list[Any] = []
    for result in results:
        source = result.get("source_call_id") if isinstance(result, dict) else None
        if not isinstance(result, dict):
            messages.append(result)
        elif source is not None or not left:
            left = [one for one in left if one != source]
            messages.append({"role": "tool", "content": result.get("content"), "tool_call_id": source})
        else:
            messages += answers(left, result.get("content"))
            left = []
    return messages


_TERMINUS_KEYS = words(
    "conversations agent model model_provider date task episode run_id trial_name result reward resolved success id "
    "task_id instruction verifier_output"
)
_CALLED = ("tool_calls", "tool_call_id", "function_call", "reasoning_content")
_REFUSED = ("previous response had parsing errors", "error:", "warnings:")


@told_by(lambda row: misfit({"conversations": turns_of(row)}, conversations=("role", "content")))
def read_terminus(row: dict[str, Any]) -> ChatRow:
    """A Terminus trajectory, whose prompts are messages of the user and whose actions are JSON texts."""
    meta = "task episode run_id agent model"
    chat = ChatRow.of(row, _TERMINUS_KEYS, id="id trial_name", group="task_id task", meta=meta, told=row)
    chat.domain, chat.rule = "terminal", "bash"
    if chat.id and row.get("episode") is not None:  # the same trial is written once an episode, each with its prefix
        chat.id = f"{chat.id}/{row['episode']}"
    items = list_of(row, "conversations", "a list of {role, content}")
    chat.messages = each_object(items, lambda said: [_terminus(said, chat.ignored)])
    return chat


def _terminus(said: dict[str, Any], ignored: Counter[str]) -> dict[str, Any]:
    count_unknown(said, ("role", "content", *_CALLED), "conversations[].", ignored)
    role, content = said.get("role"), said.get("content")
    called = {key: said[key] for key in _CALLED if said.get(key)}  # no Terminus: others call chats conversations, too
    marks: dict[str, Any] = acts_in(content) if role == "assistant" else {}
    if role == "user":
        marks = {FAILED: str(content).lstrip().lower().startswith(_REFUSED)}
    return {"role": role, "content": content, **called, **marks}


# tasks

_FORMS = ("task.toml", "task.yaml")
_TESTS, _LOGS = "/tests", "/logs/verifier"
_UNUSED = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck")
# what tests run with: an episode that changes one of these could judge itself
_OF_THE_SYSTEM = re.compile(r"/(usr/)?(s?bin|lib[0-9a-z]*)/.*")
_LOADED_UNASKED = re.compile(
    r"/etc/ld\.so\.preload|.*/(site|user)customize\.py|/(conftest\.py|pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml)"
    r"|/usr/local/s?bin/(bash|sh|python3?|pytest|uvx?|cat|grep|diff|cmp)"
)


@dataclass(frozen=True, kw_only=True)
class HarborTasks(InContainers):
    """Task folders of Harbor (Terminal-Bench 2) and of Terminal-Bench 1, each scored by its own tests.

    The tasks below FOLDER are assigned to splits by a hash of their names; with `held_out`, those of that folder are
    "dev" and "test". A command that plays only held-out tasks needs it.
    """

    argument: str | None = None
    system_changes: Literal["refuse", "allow"] = "refuse"
    """Whether an episode is paid that changed programs, libraries or settings with which the tests run."""

    def source(self) -> str:
        return named(self.argument, "harbor:FOLDER")

    def of_split(self, split: str, count: int, seed: int) -> list[ContainerTask]:
        where, fractions = self.source(), {"fractions": {"train": 1.0}} if self.held_out else {}
        if self.held_out is not None and split != TRAIN:
            where, fractions = self.held_out, {"fractions": HELD_OUT}
        found = of_split(
            folders(where), split, count, seed=seed, where=where, key=lambda path: path.name, closed=True, **fractions
        )
        strict = self.system_changes == "refuse"
        return [(_harbor if (path / "task.toml").is_file() else _terminal_bench)(path, strict) for _, path in found]


def folders(root: str) -> list[Path]:
    """The task folders below a folder, or itself. Raises `InputError` where there is none."""
    top = Path(root).expanduser()
    if not (found := sorted({path.parent for form in _FORMS for path in [*top.glob(form), *top.glob(f"**/{form}")]})):
        raise InputError("holds no task (task.toml, or task.yaml)", path=root, hint="name a folder of Harbor tasks")
    return found


def _harbor(folder: Path, strict: bool) -> ContainerTask:
    path = folder / "task.toml"
    told = read_toml(path)
    if told.get("steps"):
        raise InputError("has several steps, which are not played", path=str(path), field="steps")
    tables = ("environment", "verifier", "agent", "metadata")
    with placed(path=path):
        environment, verifier, agent, metadata = (object_of(told, key) for key in tables)
    if unused := [key for key in _UNUSED if environment.get(key)] + ["artifacts"] * bool(told.get("artifacts")):
        notice(f"{path}: {', '.join(unused)} not used")
    if verifier.get("environment") or verifier.get("environment_mode") == "separate":
        raise InputError("has a verifier in a container of its own, which is not made", path=path, field="verifier")
    commands = metadata.get("commands")
    tests = Tests(
        files=lambda: test_files(folder / "tests", "test.sh"),
        script="test.sh",
        seconds=_positive(verifier, "timeout_sec", 600.0, path),
        user=str(verifier.get("user") or "0"),
        environment=_literal(verifier, path),
        strict=strict,
    )
    return ContainerTask(
        id=folder.name,
        kind=str(metadata["category"]) if metadata.get("category") else None,
        instruction=read_text(folder / "instruction.md"),
        image=_image(folder / "environment", environment.get("docker_image")),
        judge=tests.judge,
        folder=str(environment.get("workdir") or ""),
        user=str(agent.get("user") or ""),
        environment=_literal(environment, path),
        gold=tuple(map(str, commands)) if commands else _solution(folder / "solution" / "solve.sh"),
    )


def _terminal_bench(folder: Path, strict: bool) -> ContainerTask:
    """The first layout: task.yaml, a Dockerfile beside it, run-tests.sh, whose exit code says whether all passed."""
    path = folder / "task.yaml"
    told = _yaml(path)
    if not isinstance(told.get("instruction"), str):
        raise InputError("is missing", path=str(path), field="instruction")
    tests = Tests(
        files=lambda: test_files(folder / "tests", "run-tests.sh", folder / "run-tests.sh"),
        script="run-tests.sh",
        seconds=_positive(told, "max_test_timeout_sec", 60.0, path),
        environment={"TEST_DIR": _TESTS},
        strict=strict,
        by_exit_code=True,
    )
    return ContainerTask(
        id=folder.name,
        kind=str(told["category"]) if told.get("category") else None,
        instruction=told["instruction"],
        image=_image(folder, None),
        judge=tests.judge,
        gold=_solution(folder / "solution.sh"),
    )


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        return as_object(yaml.safe_load(read_text(path)))
    except yaml.YAMLError as error:
        raise InputError(f"is no YAML: {' '.join(str(error).split())}", path=str(path)) from error


def _positive(told: Mapping[str, Any], key: str, default: float, path: Path) -> float:
    try:
        value = number(told.get(key, default))
    except ValueError as error:
        raise InputError(f"is {error}", path=str(path), field=key) from error
    if value <= 0:
        raise InputError("must be above 0", path=str(path), field=key)
    return value


def _literal(told: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Variables as the task gives them; those of the machine are not handed to a container."""
    with placed(path=path):
        given = {str(name): str(value) for name, value in object_of(told, "env").items()}
    for name, value in given.items():
        if "${" in value:
            problem = "takes a variable of this machine"
            raise InputError(problem, path=path, field=f"env.{name}", hint="write its value")
    return given


def _solution(path: Path) -> tuple[str, ...]:
    return (read_text(path),) if path.is_file() else ()


def _image(folder: Path, name: str | None) -> Any:
    """How the image of a task is found: by name, or built of a folder with a Dockerfile."""
    for path in folder.glob("docker-compose.y*ml"):
        if others := sorted(as_object(_yaml(path).get("services")).keys() - {"main", "client"}):
            raise InputError("is not started: a task is one container", path=path, field=f"services.{others[0]}")
    if name is not None:
        return lambda host: host.image(name)
    if not (folder / "Dockerfile").is_file():
        raise InputError("has no image", path=str(folder), hint="give it a Dockerfile, or a docker_image in task.toml")
    return lambda host: host.build(folder, f"localhost/turntree-harbor:{tree_hash(folder)}")


def test_files(folder: Path, script: str, beside: Path | None = None) -> dict[str, bytes]:
    """Those of a folder, and one beside it, by their paths. Raises `InputError` where the script is not among them."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found |= {beside.name: beside.read_bytes()} if beside is not None and beside.is_file() else {}
    if script not in found:
        raise InputError("is missing", path=str(folder), field=script)
    return found


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests of a task. They are in its container only while they run, after the episode.

    `files`, by their paths, are copied to /tests, and `script` is run there. The reward is in /logs/verifier
    (reward.json or reward.txt); with `by_exit_code` it is 1 for exit code 0. Tests that take longer than `seconds`,
    and those that write no reward, give none (`EnvironmentFault`): a slow machine is no failure of the policy.

    Not paid, with the reason: an episode that changed the tests while they ran, whose processes write a reward where no
    test runs, and (`strict`) that changed what the tests run with. What it cannot see is in docs/containers.md.
    """

    files: Callable[[], Mapping[str, bytes]]
    script: str
    seconds: float
    user: str = "0"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    strict: bool = True
    by_exit_code: bool = False

    def judge(self, shell: ContainerShell) -> Judged:
        files = self.files()
        changed = _leaves(shell.changed())
        if self.strict and (reached := [path for path, kind in changed.items() if _of_the_judge(path, kind)]):
            return Judged(0.0, f"the episode changed what the tests run with ({', '.join(reached[:3])})", tampered=True)
        if shell.background:
            self._ran(shell, {self.script: b"#!/bin/sh\nsleep 1\n"}, 30.0)
            if _unpacked(shell.get(_LOGS)).keys() & {"reward.json", "reward.txt"}:  # half written ones, too
                return Judged(0.0, "a process of the episode writes the reward", tampered=True)
        ran = self._ran(shell, files, self.seconds)
        if _unpacked(shell.get(_TESTS)).items() & files.items() != files.items():
            return Judged(0.0, "the tests were changed while they ran", tampered=True)
        if ran.stopped or (self.by_exit_code and ran.code == KILLED):
            raise EnvironmentFault(f"the tests were stopped: {ran}")
        reward = float(ran.code == 0) if self.by_exit_code else _reward(shell)
        if reward is None:
            raise EnvironmentFault(f"the tests wrote no reward: {ran}")
        return Judged(reward, str(ran))

    def _ran(self, shell: ContainerShell, files: Mapping[str, bytes], seconds: float) -> Ran:
        """Lay files into the folder of tests and run the script, beside processes of the episode. These stand still
        before and after it: what they write to cannot be unpacked, or read back."""
        shell.signal("STOP")
        clean = (
            f"[ -d /logs ] || rm -rf /logs; rm -rf {_TESTS} {_LOGS} && mkdir -p {_TESTS} {_LOGS} && chmod 777 {_LOGS}"
        )
        laid = shell.script(["/bin/sh", "-c", clean], seconds=60.0)
        if laid.code != 0:
            raise EnvironmentFault(f"the tests could not be laid into the container: {laid}")
        shell.put(_packed(files), _TESTS)
        shell.signal("CONT")
        # bytecode beside sources may be the episode's
        environment = {"PYTHONPYCACHEPREFIX": f"{_LOGS}/bytecode", **self.environment}
        words = [f"{_TESTS}/{self.script}"]
        ran = shell.script(words, seconds=seconds, environment=environment, user=self.user)
        shell.signal("STOP")
        return ran


def _leaves(changed: Mapping[str, int]) -> dict[str, int]:
    """Without the folders that are there because something in them was changed."""
    above = {str(parent) for path in changed for parent in Path(path).parents}
    return {path: kind for path, kind in changed.items() if path not in above}


def _of_the_judge(path: str, kind: int) -> bool:
    """Whether tests run with what was changed (0), added (1) or deleted (2) there, without being told to."""
    return bool(_LOADED_UNASKED.fullmatch(path) or (kind != 1 and _OF_THE_SYSTEM.fullmatch(path)))


def _reward(shell: ContainerShell) -> float | None:
    """Of several named numbers the one called `reward`. Raises `EnvironmentFault` for what is no reward."""
    found = _unpacked(shell.get(_LOGS))
    text = found.get("reward.json", found.get("reward.txt"))
    if text is None:
        return None
    try:
        value: Any = json.loads(text) if "reward.json" in found else float(text)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
        return number(value)
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"the tests wrote a reward that is none ({text[:80]!r})") from error


def _packed(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return held.getvalue()


def _unpacked(archive: bytes | None) -> dict[str, bytes]:
    """The files of a folder by their paths in it."""
    if archive is None:
        return {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened_archive:
            members = [member for member in opened_archive if member.isfile()]
            return {
                member.name.partition("/")[2]: held.read()
                for member in members
                if (held := opened_archive.extractfile(member)) is not None
            }
    except tarfile.TarError as error:
        raise EnvironmentFault(f"the daemon sent files that cannot be read: {error}") from error
