"""The same game, stepped in this process and played by an agent of its own: the same trees, rewards and credit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from examples.hide_and_seek import HideAndSeek, tasks
from gateway_world import engine, renderer, spelled

from turntree.core.completion import Sampling
from turntree.core.labels import Credit
from turntree.credit.credit import CreditRule
from turntree.env.tasks import TRAIN, Replayed
from turntree.gateway.environment import AgentTasks
from turntree.rollout.accounting import account
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import player_of
from turntree.rollout.scheduler import SchedulerConfig

AGENT = Path(__file__).resolve().parents[2] / "examples" / "room_agent.py"
SETTINGS = SchedulerConfig(group_size=2, episodes=EpisodeConfig(max_turns=2, sampling=Sampling(max_tokens=40)))
PLACES = ("fridge", "desk", "armchair", "cabinet")


def names_a_place(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """A policy whose words depend on what it was told and on its draws, which have the same keys here and there."""
    return spelled(f"go to {PLACES[(sum(prompt) + seed) % 4]} 1")


def played(group: GrownGroup, credit: Credit) -> list[Any]:
    """All that a group holds, whatever the order of its nodes."""
    tree = group.tree
    rollouts = []
    for end, verdict in group.rewards.verdicts.items():
        path = [
            (
                node.kind,
                node.token_ids,
                node.logprobs,
                [(m.role, m.content) for m in node.messages],
                credit.nodes.get(node.id),
            )
            for node in tree.path(end)
            if node.sampled or tree.children(node.id)  # the scheduler also keeps what is said after the last turn
        ]
        rollouts.append((path, tree.stop_reason(end), verdict.reward, verdict.success))
    return sorted(rollouts, key=str)


def test_a_game_gives_the_same_trees_whoever_plays_it(tmp_path: Path) -> None:
    rooms = tmp_path / "rooms.jsonl"
    shown = [{"thing": room.thing, "places": room.places, "tries": room.tries} for room in tasks("train", 40, seed=0)]
    rooms.write_text("".join(json.dumps(row) + "\n" for row in shown))
    with AgentTasks(argument=f"{sys.executable} {AGENT}", tasks=str(rooms)).open({TRAIN: 4}, seed=0) as opened:
        agents = opened.tasks[TRAIN]
        rows = [(one.task_id, one.row) for one in agents]
        stepped = [Replayed(HideAndSeek(name, row["thing"], row["places"], row["tries"])) for name, row in rows]
        outside, inside = (
            list(player_of(each, engine(names_a_place), renderer(), SETTINGS).run(each, seed=0, iteration=1))
            for each in (agents, stepped)
        )
    assert {group.rewards.of(end) for group in inside for end in group.tree.ends()} == {0.0, 1.0}
    for one, other in zip(outside, inside, strict=True):
        assert len(one.rewards.verdicts) == 2
        credits = [CreditRule()(group.tree, group.rewards) for group in (one, other)]
        assert played(one, credits[0]) == played(other, credits[1])
        assert account(one.tree) == account(other.tree)
        assert one.tree.cost.decoded_tokens == other.tree.cost.decoded_tokens
