"""How generous is the household verifier: acceptance of typical wrong, idle and rival commands on expert states.

    python -m turntree.domains.household.audit                          # generated games
    python -m turntree.domains.household.audit --games valid_seen.jsonl.xz

States are those of an exploring expert; at each of them every proposal is judged beside what the expert did next.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from turntree.core import seeds
from turntree.domains.household.experts import explore, next_exploring_action, shortest_plan
from turntree.domains.household.games import load_games
from turntree.domains.household.generate import EASY, HARD, MEDIUM, generate_games
from turntree.domains.household.verifier import action_kind, judge
from turntree.domains.household.world import Game, State

Proposal = Callable[[State, str, random.Random], str]


def _random_changing(state: State, _: str, rng: random.Random) -> str:
    commands = [command for command in state.admissible() if state.fork().step(command).changed]
    return rng.choice(commands)


PROPOSALS: Mapping[str, Proposal] = {
    "gold": lambda state, gold, rng: gold,
    "look": lambda state, gold, rng: "look",
    "inventory": lambda state, gold, rng: "inventory",
    "random admissible": lambda state, gold, rng: rng.choice(state.admissible()),
    "random changing": _random_changing,
    "another explorer": lambda state, gold, rng: next_exploring_action(state, rng),
    "shortest plan": lambda state, gold, rng: shortest_plan(state)[0],
}


@dataclass(frozen=True)
class Audit:
    """Counts over the same states: `judged[kind]`, `accepted[proposal, kind]` and `reasons[proposal, reason]`, where
    kind is that of the demonstrated command."""

    judged: Mapping[str, int]
    accepted: Mapping[tuple[str, str], int]
    reasons: Mapping[tuple[str, str], int]

    @property
    def states(self) -> int:
        return sum(self.judged.values())

    def rate(self, proposal: str) -> float:
        return sum(self.accepted.get((proposal, kind), 0) for kind in self.judged) / self.states


def expert_states(games: Iterable[Game], seed: int) -> Iterator[tuple[State, str]]:
    """The states of an exploring expert, each with the expert's next command (the state moves on afterwards)."""
    for game in games:
        state = game.reset()
        for command in explore(state, seeds.generator(seed, "audit expert", game.id)):
            yield state, command
            state.step(command)


def audit(games: Iterable[Game], seed: int = 0) -> Audit:
    """Judge every proposal at every state of the expert."""
    judged: Counter[str] = Counter()
    accepted: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    rng = seeds.generator(seed, "audit proposals")
    for state, gold in expert_states(games, seed):
        kind = action_kind(state, gold)
        judged[kind] += 1
        for name, propose in PROPOSALS.items():
            verdict = judge(state, gold, propose(state, gold, rng))
            accepted[name, kind] += verdict.reward == 1.0
            reasons[name, verdict.reason] += 1
    return Audit(judged, accepted, reasons)


def table(result: Audit) -> str:
    """Acceptance by proposal (rows) and by the kind of the demonstrated command (columns), as Markdown."""
    kinds = sorted(result.judged, key=lambda kind: -result.judged[kind])
    lines = [
        f"| proposal | all ({result.states}) | " + " | ".join(f"{k} ({result.judged[k]})" for k in kinds) + " |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    for name in PROPOSALS:
        rates = [result.rate(name), *(result.accepted[name, kind] / result.judged[kind] for kind in kinds)]
        lines.append(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", help="a packed file or folder of official games; default: generated games")
    parser.add_argument("--number", type=int, default=150, help="games of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.games:
        print(table(audit(load_games(options.games, limit=options.number), options.seed)))
        return
    for level in (EASY, MEDIUM, HARD):
        games = (game.parse() for game in generate_games(options.seed, options.number, difficulty=level))
        print(f"\n{level.name}\n{table(audit(games, options.seed))}")


if __name__ == "__main__":
    main()
