"""What string matching pays and execution refutes, in containers:

    python recipes/container_verdicts.py play --out FILE.jsonl [--tasks 65] [--part 0/2]
    python recipes/container_verdicts.py table FILE.jsonl ...
    python recipes/container_verdicts.py samples EXECUTED.jsonl STRINGS.jsonl [EXECUTED.jsonl STRINGS.jsonl ...]

The tasks are those of container_tasks.py, the demonstrator plays each one's solution. At every turn of it, actions that
a policy could sample (`KINDS`) are judged in four ways: by names and by strings (`paper`, its rules for software and
for the terminal), by effect (`executed`: the same answer and the same state as the demonstration), and by `outcome`:
the demonstrator goes on from there to the end, and the tests judge. Each is played once, in a fork of the turn's
container. Rows are written as they are known, and a second call goes on where the first one stopped.

`samples` compares two profiles of the same samples: one by `executed`, and what `turntree rescore --verifier paper`
made of it.

The table has a 95% interval from a bootstrap over tasks, because samples of one task are no independent draws (Wilson's
over tasks where all tasks are alike). Shares depend on the mix of actions, which is ours; the rows by kind do not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Environment, TurnState, task_of
from turntree.env.tasks import open_tasks
from turntree.rollout.rebuild import said
from turntree.run.means import wilson
from turntree.verify.paper import Paper

sys.path.insert(0, str(Path(__file__).parent))
import container_tasks

KINDS = {
    "control": "the demonstrated command",
    "reworded": "the same work in other words",
    "slip": "a digit or a word wrong",
    "fault": "another way, which the tests must fail",
    "look": "looking elsewhere",
    "ahead": "the next demonstrated command",
}
# other words for the same; the first that fits is taken
WORDINGS = (
    (r"chmod a\+x (.*)", r"chmod ugo+x \1"),
    (r"chmod 600 (.*)", r"chmod u=rw,go= \1"),
    (r"mkdir -p (\S+) && chmod 700 \1", r"install -d -m 700 \1"),
    (r"(.*)sort -u ([^ )]+)(.*)", r"\1sort \2 | uniq\3"),
    (r"head -n (\d+) (.*)", r"sed -n 1,\1p \2"),
    (r"(.*)git log --oneline", r"\1git log --pretty=oneline --abbrev-commit"),
    (r"git revert --no-edit HEAD~1", r"git revert --no-edit $(git rev-parse HEAD~1)"),
    (r"git add file && git commit -qm (\w+)", r"git commit -qam \1"),
    (r"(.*)git merge (\w+)", r"\1git merge --no-edit \2"),
    (r"sed -i 's/(\^?\w[^/]*)/([^/\\]*)/' (.*)", r"perl -pi -e 's/\1/\2/' \3"),
    (r"(cd \S+) && cat (.*)", r"\1 && cat < \2"),
    (r"cat (.*)", r"cat < \1"),
    (r"printf '(.*)\\n' > (\S+)", r"""echo -e '\1' | cat > \2"""),
    (r"bash (\S+)", r"source \1"),
    (r"(cd \S+) && ls -l", r"\1 && ls -l ."),
    (r"ls -l (\S+) (\S+)", r"ls -l \2 \1"),
    (r"tar -czf (\S+) (.*)", r"tar --create --gzip --file \1 \2"),
    (r"tar -tzf (.*)", r"tar --list --file \1"),
    (r"find (\S+) -type f \| sort", r"find \1 -type f -print | sort"),
    (r"for f in (.*)", r"for f in $(true) \1"),
    (r"(.*)grep -rl (.*)", r"\1grep --recursive --files-with-matches \2"),
    (r"grep ERROR (\S+) \| (.*)", r"cat \1 | grep ERROR | \2"),
    (r"python3 -c (.*)", r"python3 -B -c \1"),
)
LOOKS = ("ls -la /app", "find /app -type f | head", "cat /etc/os-release | head -n 2", "pwd")


Row = dict[str, Any]


def actions(draft: container_tasks.Draft, turn: int, rng: random.Random) -> dict[str, str]:
    """Commands that a policy could sample in place of the demonstrated one, by their kind."""
    shown = draft.commands[turn]
    made = {"control": shown, "look": rng.choice(LOOKS), "slip": _slip(shown, rng)}
    made["reworded"] = next(
        (re.sub(f"^{old}$", new, shown) for old, new in WORDINGS if re.fullmatch(old, shown)), shown
    )
    made["fault"] = "\n".join(rng.choice([each for each in draft.mutants if each]))
    made["ahead"] = draft.commands[turn + 1] if turn + 1 < len(draft.commands) else shown
    return {kind: command for kind, command in made.items() if kind == "control" or command != shown}


def _slip(command: str, rng: random.Random) -> str:
    """One number is another one, or one word is another one that begins alike, or a letter is lost."""
    numbers = list(re.finditer(r"(?<![\w~])\d+", command))
    words = [found for word in container_tasks.WORDS for found in re.finditer(rf"\b{word}\b", command)]
    if numbers and (not words or rng.random() < 0.5):
        found = rng.choice(numbers)
        return command[: found.start()] + str(int(found[0]) + 1) + command[found.end() :]
    if words:
        found = rng.choice(words)
        other = rng.choice([word for word in container_tasks.WORDS if word != found[0]])
        return command[: found.start()] + other + command[found.end() :]
    letters = [place for place, letter in enumerate(command) if letter.isalpha()]
    place = rng.choice(letters)
    return command[:place] + command[place + 1 :]


def called(name: str, **arguments: str) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments, "call"),))


def effect(environment: Environment, action: Message) -> tuple[Any, Any, bool]:
    """What `executed` compares where an environment tells no progress: the answer, the state, whether it has ended."""
    answer = environment.step(action)
    return said(answer.messages), task_of(environment).state(), answer.done


def finished(environment: Environment, commands: Sequence[str]) -> float:
    """The reward where the demonstrator goes on."""
    for command in commands:
        environment.step(called("bash", command=command))
    return float(environment.step(called("submit")).reward or 0.0)


def played(task: Environment, draft: container_tasks.Draft, seed: int) -> list[Row]:
    """One row an action. Raises `EnvironmentFault`."""
    at, rows = task.fork(), []
    history = tuple(at.reset())
    before = task_of(at).state()
    for turn, command in enumerate(draft.commands):
        demonstration = called("bash", command=command)
        state = TurnState(f"{task.task_id}/{turn}", turn, history, demonstration, tuple(task.tools))
        rng = random.Random(f"{seed} {task.task_id} {turn}")
        found: list[tuple[Row, Any]] = []
        for kind, tried in actions(draft, turn, rng).items():
            fork, action = at.fork(), called("bash", command=tried)
            did = effect(fork, action)
            row = {
                "task": task.task_id, "turn": turn, "kind": kind, "command": tried, "shown": command,
                "names": Paper(domain="swe").judge(state, action).reward,
                "strings": Paper(domain="terminal").judge(state, action).reward,
                "outcome": finished(fork, draft.commands[turn + 1 :]),
            }  # fmt: skip
            found.append((row, did))
        shown = effect(at, demonstration)
        steady = found[0][1] == shown  # the control: what is answered differently is not judged by effect
        for row, did in found:
            row |= {"executed": float(did == shown) if steady else None, "acts": shown[1]["files"] != before["files"]}
        rows += [row for row, _ in found]
        before = shown[1]
        history = (*history, demonstration, *(Message(role, text) for role, text in shown[0]))
    return rows


def play(out: Path, count: int, part: str, seed: int) -> None:
    mine, of = map(int, part.split("/"))
    known = {row["task"] for row in _rows([out])} if out.exists() else set()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as nothing:
        for number in range(mine, count, of):
            family, draft = container_tasks.generated(number)
            name = f"{family}-{number:03}"
            if name in known:
                continue
            root = container_tasks.write(number, Path(folder))
            with open_tasks(Part(f"harbor:{root}", {"held_out": nothing}), {"train": 1}) as tasks:
                try:
                    rows = played(tasks.of("train")[0], draft, seed)
                except EnvironmentFault as fault:
                    print(f"{name}: left out, {fault}", flush=True)
                    continue
            with out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            print(f"{name}: {len(rows)} actions", flush=True)


def _rows(paths: Sequence[Path]) -> list[Row]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


# the table


def share(rows: Sequence[Row], of: Callable[[Row], bool], given: Callable[[Row], bool]) -> str:
    """The share of rows that are `of` among those that are `given`, with a 95% interval over tasks."""
    tasks: dict[str, tuple[int, int]] = {}
    for row in filter(given, rows):
        yes, n = tasks.get(row["task"], (0, 0))
        tasks[row["task"]] = (yes + of(row), n + 1)
    counts = list(tasks.values())
    if not counts:
        return "none"
    rng = random.Random(0)
    draws = [rng.choices(counts, k=len(counts)) for _ in range(2000)]
    means = sorted(sum(yes for yes, _ in draw) / sum(n for _, n in draw) for draw in draws)
    total, n = sum(yes for yes, _ in counts), sum(n for _, n in counts)
    low, high = means[50], means[1949]
    if low == high:  # all tasks are alike, which says less than that all will be
        low, high = wilson(total / n * len(counts), len(counts))
    return f"{total} of {n}: {total / n:.0%} [{low:.0%}, {high:.0%}]"


def paid(name: str, value: float = 1.0) -> Callable[[Row], bool]:
    """Whether a judge gives `value`; of outcomes and refusals everything below 1 is none."""
    return lambda row: row[name] is not None and float(row[name] >= 1.0) == value


def both(one: Callable[[Row], bool], other: Callable[[Row], bool]) -> Callable[[Row], bool]:
    return lambda row: one(row) and other(row)


def table(paths: Sequence[Path]) -> None:
    everything = _rows(paths)
    controls = [row for row in everything if row["kind"] == "control"]
    rows = [row for row in everything if row["kind"] != "control"]
    judged = [row for row in rows if row["executed"] is not None]
    print(f"{len({row['task'] for row in rows})} tasks, {len(controls)} turns, {len(rows)} actions beside the control")
    print(f"not judged by effect (answered differently the second time): {len(rows) - len(judged)} actions of "
          f"{sum(row['executed'] is None for row in controls)} turns")  # fmt: skip
    print(f"the demonstrated command itself: outcome {share(controls, paid('outcome'), lambda row: True)}\n")
    print("| action | names | strings | executed | outcome |\n|---|---|---|---|---|")
    for kind, told in KINDS.items():
        of_kind = [row for row in judged if row["kind"] == kind]
        cells = [share(of_kind, paid(name), lambda row: True) for name in ("names", "strings", "executed", "outcome")]
        if of_kind:
            print(f"| {told} | {' | '.join(cells)} |")
    print("\n| question | all turns | turns that change files |\n|---|---|---|")
    for one, other in (("names", "executed"), ("strings", "executed"), ("names", "outcome"), ("strings", "outcome"),
                       ("executed", "outcome")):  # fmt: skip
        for told, of, given in (
            (f"paid by {one}, refused by {other}", paid(other, 0.0), paid(one)),
            (f"refused by {one}, paid by {other}", paid(one, 0.0), paid(other)),
        ):
            acting = [row for row in judged if row["acts"]]
            print(f"| {told} | {share(judged, of, given)} | {share(acting, of, given)} |")


def samples(paths: Sequence[Path]) -> None:
    """What a policy sampled, one row a sample: of all, and of those that are not the demonstration word by word."""
    rows: list[Row] = []
    for executed, strings in zip(paths[::2], paths[1::2], strict=True):
        again = {(turn["trace_id"], turn["turn"], each["text"]): each for turn in _rows([strings])[1:]
                 for each in turn["actions"]}  # fmt: skip
        for turn in _rows([executed])[1:]:
            for action in turn["actions"]:
                other = again[turn["trace_id"], turn["turn"], action["text"]]
                row = {"task": turn["trace_id"], "executed": action["reward"], "strings": other["reward"]}
                if None not in row.values():
                    rows += [row | {"same": action["strict"] == 1.0}] * action["count"]
    print("| question | all samples | not word by word |\n|---|---|---|")
    others = [row for row in rows if not row["same"]]
    for name in ("executed", "strings"):
        print(f"| paid by {name} | {share(rows, paid(name), bool)} | {share(others, paid(name), bool)} |")
    for one, other in (("strings", "executed"), ("executed", "strings")):
        told = (share(of, paid(other, 0.0), paid(one)) for of in (rows, others))
        print(f"| paid by {one}, refused by {other} | {' | '.join(told)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    playing = commands.add_parser("play")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--tasks", type=int, default=65)
    playing.add_argument("--part", default="0/1", help="this of so many processes that share the tasks")
    playing.add_argument("--seed", type=int, default=0)
    for name in ("table", "samples"):
        commands.add_parser(name).add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    try:
        if given.what == "play":
            play(given.out, given.tasks, given.part, given.seed)
        else:
            {"table": table, "samples": samples}[given.what](given.files)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
