"""Tiny folders of online training, written as its stage writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.config import from_mapping, to_mapping
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.trees import KeptTree
from turntree.run.files import write_json
from turntree.stages.config import TrainOnlineConfig

TASKS = 4


def search(query: str) -> str:
    return f'search({{"query": "{query}"}})'


@dataclass(frozen=True)
class Played:
    """A rollout that shares its first `shared` turns with the one before."""

    actions: Sequence[str]
    reward: float | None
    shared: int = 0
    refill: bool = False


def grown(played: Sequence[Played], *, iteration: int = 1, name: str = "g", task: str = "t") -> KeptTree:
    """The tree of such rollouts: seven tokens a turn, an answer after each."""
    tree = RolloutTree(task)
    root = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", f"the question of {task}"),)).id
    verdicts: dict[int, Verdict] = {}
    path: list[int] = []
    for one in played:
        path = path[: one.shared]
        for turn, action in enumerate(one.actions[one.shared :], start=one.shared + 1):
            above = path[-1] if path else root
            said = (Message("assistant", action),)
            node = tree.add(above, NodeKind.COMPLETION, (7,) * 7, logprobs=(-0.5,) * 7, messages=said).id
            if one.refill and turn == 1:
                tree.mark_refill(node)
            seen = Message("tool", f"seen before turn {turn + 1}")
            path.append(tree.add(node, NodeKind.OBSERVATION, (5,), messages=(seen,)).id)
        tree.stop(path[-1], StopReason.ENVIRONMENT_ERROR if one.reward is None else StopReason.COMPLETED)
        verdicts[path[-1]] = Verdict(one.reward, "it fell over" if one.reward is None else "it was judged")
    return KeptTree(id=name, iteration=iteration, tree=tree, rewards=Rewards(verdicts))


def mixed_group() -> KeptTree:
    """Two starts and a refill; the second rollout forks from the first after one turn and wins."""
    played = (
        Played([search("mayor of <Eaton>"), search("a & b"), "<answer>Kirk</answer>"], 0.0),
        Played([search("mayor of <Eaton>"), search("the right thing"), "<answer>Istria</answer>"], 1.0, shared=1),
        Played([search("nothing")], None),
        Played([search("again"), "<answer>Oak</answer>"], 0.0, refill=True),
    )
    return grown(played, iteration=2, name="2.0", task="task-7")


def equal_group() -> KeptTree:
    return grown((Played(["a"], 1.0), Played(["b"], 1.0)), name="1.0", task="task-1")


def metrics(success: Sequence[float], calls: int = 10) -> list[Any]:
    """A check before training and after every iteration; iteration t makes `calls` fresh calls of 16 in a chain."""
    branching = {
        **dict.fromkeys(("leaves", "starts", "refills", "forks", "tokens_fresh", "tokens_chain"), 4),
        "starts": 3,
        "refills": 1,
        "forks": 1,
        "calls_fresh": calls,
        "calls_chain": 16,
        "structural_saving": 1 - calls / 16,
        "forks_by_turn": {"2": 2, "10": 1},
    }
    rows: list[Any] = [{"step": 0, "held_out_success": success[0], "held_out_turns_per_episode": 4.0}]
    for step, held_out in enumerate(success[1:], start=1):
        logged = {
            "step": step,
            "groups": 1,
            "reward_mean": 0.5,
            "zero_variance_share": 0.25,
            "stops": {"completed": 3, "max_turns": 1},
            "branching": branching,
            "trees": {"calls_fresh": calls * step, "calls_chain": 16 * step},
            "spent": {"turns": 20 * step, "decoded_tokens": 100 * step},
            "held_out_success": held_out,
            "held_out_turns_per_episode": 4.0,
        }
        rows.append(logged)
    return rows


def decision(action: str, reason: str, value: float) -> Decision:
    return Decision("brancher", 0, action, reason, {"turn": 2.0, "entropy": 0.1, "value": value})


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_online_run(path: Path) -> Path:
    """Held-out success rises from one task of four to three; ten of sixteen calls an iteration are fresh."""
    rollouts = {"initial_rollouts": 2, "group_size": 4}
    settings = {"model": "qa", "brancher": {"name": "entropy"}, "train": rollouts}
    config = to_mapping(from_mapping(TrainOnlineConfig, settings))  # by the names that the stage writes
    write_json(path / "config.json", {"stage": "train online", "config": config})
    write_lines(path / "metrics.jsonl", metrics([0.25, 0.5, 0.75]))
    write_lines(path / "held_out.jsonl", [*outcomes(0, 1), *outcomes(1, 2), *outcomes(2, 3)])
    told = [decision("fork", "entropy rose", 0.7)] * 3 + [decision("pass", "entropy did not rise enough", 0.5)] * 5
    told.append(decision("pass", "entropy rose, but no leaf is left to add", 0.8))
    groups = [equal_group(), mixed_group()]
    for one in told:
        groups[0].tree.record(one)
    write_lines(path / "trees.jsonl", [group.to_json() for group in groups])
    with (path / "trees.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"schema": "turntree.tre\n')  # cut off by a crash
    write_json(path / "cost.json", {"turns": 40, "timing": {"engine_seconds": 2.0}, "checks": {"turns": 12}})
    return path


def outcomes(iteration: int, wins: int) -> list[Any]:
    return [{"iteration": iteration, "task": f"t{t}", "rewards": [float(t < wins)] * 2} for t in range(TASKS)]
