"""The savings ledger against sums done by hand."""

from __future__ import annotations

import json

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollout.groups import GrownGroup
from turntree.train.savings import SavingsLedger
from turntree_worlds.household.environment import HouseholdEnvironment
from turntree_worlds.household.generate import generate_game

TASK = HouseholdEnvironment(generate_game(0).parse())
TURN, STEP = Cost(turns=1, decoded_tokens=10), Cost(tool_calls=1, environment_seconds=0.5)


def group(*turns: int, cut: int | None = None, beyond: Cost = NO_COST) -> GrownGroup:
    """Independent rollouts of so many turns; in a cut group those that reached the cut were alive, and the cost of what
    each had played `beyond` it lies in an empty observation."""
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1, 2, 3), cost=Cost(prefilled_tokens=3))
    verdicts: dict[int, Verdict] = {}
    for count in turns:
        leaf = root.id
        for _ in range(count):
            said = tree.add(leaf, NodeKind.COMPLETION, (4,), logprobs=(0.0,), entropies=(0.0,), cost=TURN)
            leaf = tree.add(said.id, NodeKind.OBSERVATION, (5,), cost=STEP).id
        alive = cut is not None and count >= cut
        if alive:
            leaf = tree.add(leaf, NodeKind.OBSERVATION, (), cost=beyond).id
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


def test_what_faster_rollouts_had_played_beyond_the_cut_is_not_saved() -> None:
    ledger = SavingsLedger()
    ledger.came_back(group(3, cut=3, beyond=TURN))  # with no evidence nothing is claimed
    assert ledger.saved["gate"].turns == 0
    ledger.came_back(group(5, 7))  # after turn 3 two more turns and four
    ledger.came_back(group(3, 3, cut=3, beyond=TURN + STEP))
    saved = ledger.saved["gate"]
    assert (saved.turns, saved.decoded_tokens, saved.tool_calls) == (2 * (3 - 1), 2 * (30 - 10), 2 * (3 - 1))


def test_what_cut_groups_save_adds_up_also_after_a_single_turn() -> None:
    ledger = SavingsLedger()
    ledger.came_back(group(2, 4))  # after turn 1: one more turn and three
    for _ in range(2):
        ledger.came_back(group(3, cut=1))
    assert ledger.saved["gate"].turns == 2 * 2.0
    assert ledger.seconds() == {"gate": ledger.saved["gate"].seconds, "dapo": 0.0}
    assert set(ledger.counts()["gate"]) >= {"turns", "trained_tokens"} and "seconds" not in ledger.counts()["gate"]


def test_a_branch_is_evidence_from_where_it_was_made() -> None:
    """What it shares with the rollout that it left was paid for once."""
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1,))
    leaf = root.id
    turns = []
    for parent in (None, 0, 1, 1):  # a turn, a second, and two third ones
        leaf = root.id if parent is None else turns[parent]
        said = tree.add(leaf, NodeKind.COMPLETION, (4,), logprobs=(0.0,), entropies=(0.0,), cost=TURN)
        turns.append(tree.add(said.id, NodeKind.OBSERVATION, (5,), cost=STEP).id)
    longer = tree.add(turns[3], NodeKind.COMPLETION, (4,), logprobs=(0.0,), entropies=(0.0,), cost=TURN)
    silent = tree.add(turns[1], NodeKind.COMPLETION, (4,), logprobs=(0.0,), entropies=(0.0,), cost=TURN)
    verdicts = {}
    for leaf in (turns[2], longer.id, silent.id):  # the last says one thing and is not answered
        tree.stop(leaf, StopReason.COMPLETED)
        verdicts[leaf] = Verdict(0.0, "")
    ledger = SavingsLedger()
    ledger.came_back(GrownGroup(index=0, task=TASK, tree=tree, rewards=Rewards(verdicts), seconds=1.0))
    saved = []
    for turn in (1, 2, 3):
        before = ledger.saved["gate"].turns
        ledger.came_back(group(3, cut=turn))
        saved.append(ledger.saved["gate"].turns - before)
    # after turn 1 the first rollout alone went on, by two turns; after turn 2 it went on by one; the branch, which
    # begins at turn 3, says what one alive at turn 3 went on to cost
    assert saved == [2.0, 1.0, 1.0]


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
    ledger.filtered("dapo", -7, [group(2, 1).tree.cost])
    ledger.filtered("dapo", 0, [group(3, 3).tree.cost])
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
        each.came_back(group(9, cut=9))  # as far as nothing had come before the checkpoint
        each.skipped(["a"], refills_left=1)
        each.filtered("dapo", 5, [])
        each.filtered("Own", 7, [])
    assert ledger.counts() == other.counts()
    assert ledger.seconds() == other.seconds()
