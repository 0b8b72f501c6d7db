"""The savings ledger against sums done by hand."""

from __future__ import annotations

import json

from turntree.core.cost import Cost
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.domains.household.environment import HouseholdEnvironment
from turntree.domains.household.generate import generate_game
from turntree.rollouts.groups import GrownGroup
from turntree.training.savings import SavingsLedger

TASK = HouseholdEnvironment(generate_game(0).parse())
TURN, STEP = Cost(turns=1, decoded_tokens=10), Cost(tool_calls=1, environment_seconds=0.5)


def group(*turns: int, cut: int | None = None) -> GrownGroup:
    """Independent rollouts of so many turns; in a cut group those that reached the cut were alive."""
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1, 2, 3), cost=Cost(prefilled_tokens=3))
    verdicts: dict[int, Verdict] = {}
    for count in turns:
        leaf = root.id
        for _ in range(count):
            said = tree.add(leaf, NodeKind.COMPLETION, (4,), logprobs=(0.0,), entropies=(0.0,), cost=TURN)
            leaf = tree.add(said.id, NodeKind.OBSERVATION, (5,), cost=STEP).id
        alive = cut is not None and count >= cut
        tree.stop(leaf, StopReason.GATED if alive else StopReason.COMPLETED)
        verdicts[leaf] = Verdict(None if cut is not None else 0.0, "")
    return GrownGroup(index=0, task=TASK, tree=tree, rewards=Rewards(verdicts), seconds=1.0, cut=cut)


def test_a_cut_rollout_saves_what_rollouts_alive_at_that_turn_went_on_to_cost() -> None:
    ledger = SavingsLedger()
    ledger.came_back(group(2, 4, 7))  # after turn 3: one more turn of the second, four of the third
    ledger.came_back(group(3, 3, 1, cut=3))  # two of the three were alive
    saved = ledger.saved["gate"]
    assert (saved.turns, saved.decoded_tokens, saved.tool_calls) == (2 * 2.5, 2 * 25.0, 2 * 2.5)
    assert saved.seconds == 2 * 1.25
    assert saved.prefilled_tokens == 0  # the prompt had been paid for


def test_a_cut_group_is_no_evidence_of_what_rollouts_go_on_to_cost() -> None:
    ledger = SavingsLedger()
    for played in (group(4, 4, cut=2), group(4, 4, cut=2)):
        ledger.came_back(played)
    assert ledger.saved["gate"].turns == 0


def test_a_skipped_prompt_is_redirected_once_an_iteration_and_avoids_refills_up_to_the_cap() -> None:
    ledger = SavingsLedger()
    ledger.skipped(["a", "b", "a"], refills_left=0)
    assert ledger.counts()["greso"] == {"prompts": 2, "refills_avoided_at_most": 0}
    ledger.skipped(["a", "a"], refills_left=9)
    ledger.skipped(["a", "a"], refills_left=1)
    assert ledger.counts()["greso"] == {"prompts": 4, "refills_avoided_at_most": 3}


def test_refills_count_against_what_the_filter_saved() -> None:
    ledger = SavingsLedger()
    ledger.filtered(-7, [group(2, 1).tree.cost, group(3, 3).tree.cost])
    saved = ledger.saved["dapo"]
    assert (saved.trained_tokens, saved.turns, saved.decoded_tokens, saved.tool_calls) == (-7, -9, -90, -9)
    assert ledger.saved["gate"].turns == 0


def test_a_restored_ledger_goes_on_as_the_first_would_have() -> None:
    ledger, other = SavingsLedger(), SavingsLedger()
    ledger.came_back(group(2, 4, 7))
    ledger.skipped(["b"], refills_left=1)
    other.restore(json.loads(json.dumps(ledger.state())))
    for each in (ledger, other):
        each.came_back(group(2, 2, cut=2))
        each.skipped(["a"], refills_left=1)
        each.filtered(5, [])
    assert ledger.counts() == other.counts()
    assert ledger.seconds() == other.seconds()
