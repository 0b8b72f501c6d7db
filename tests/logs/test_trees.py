"""The rollout tree on disk: everything that was decided, whole iterations or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_world import EPISODES, TokenRenderer, TokenWorld, WatchedEngine
from turntree.core.errors import InputError
from turntree.credit.credit import CreditRule
from turntree.decide.branching.rules import RandomBrancher
from turntree.logs import trees
from turntree.logs.rollouts import group_from_tree
from turntree.logs.trees import KeptTree
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.run.jsonl import write_lines


def grown(count: int = 3, iteration: int = 1) -> list[KeptTree]:
    """Real trees: forked, refilled, scored and labelled with credit."""
    settings = SchedulerConfig(episodes=EPISODES, group_size=6, initial_rollouts=3)
    scheduler = Scheduler(
        WatchedEngine(), TokenRenderer(), settings, brancher=RandomBrancher(rate=0.6, probe_tokens=2, branches=2)
    )
    tasks = [TokenWorld(f"task {n}") for n in range(count)]
    return [
        KeptTree(
            id=f"{iteration}.{number}",
            iteration=iteration,
            tree=group.tree,
            rewards=group.rewards,
            credit=CreditRule()(group.tree, group.rewards) if number else None,
            task_type="walk",
            tools=({"type": "function", "function": {"name": "go"}},),
        )
        for number, group in enumerate(scheduler.run(tasks, seed=iteration))
    ]


def test_a_tree_comes_back_with_every_node_decision_verdict_and_credit(tmp_path: Path) -> None:
    written = grown()
    write_lines(tmp_path / "trees.jsonl", (tree.to_json() for tree in written))
    for one, other in zip(written, trees.read(tmp_path / "trees.jsonl"), strict=True):
        assert [node.messages for node in one.tree] == [node.messages for node in other.tree]
        assert [node.token_ids for node in one.tree] == [node.token_ids for node in other.tree]
        assert one.tree.decisions == other.tree.decisions and one.tree.decisions
        assert one.tree.cost.counts() == other.tree.cost.counts()
        assert other.tree.cost.seconds == pytest.approx(one.tree.cost.seconds, abs=1e-6 * len(one.tree))
        assert [one.tree.stop_reason(leaf) for leaf in one.tree.leaves()] == [
            other.tree.stop_reason(leaf) for leaf in other.tree.leaves()
        ]
        assert dict(one.rewards.verdicts) == dict(other.rewards.verdicts)
        assert one.credit == other.credit
        assert (one.id, one.iteration, one.tools, one.task_type) == (other.id, 1, other.tools, "walk")
        for mine, theirs in zip(one.tree, other.tree, strict=True):
            assert theirs.logprobs == (None if mine.logprobs is None else pytest.approx(mine.logprobs, rel=1e-8))
            assert theirs.entropies == (None if mine.entropies is None else pytest.approx(mine.entropies, rel=1e-8))


def test_a_file_of_a_version_that_wrote_no_roles_is_refused() -> None:
    row = grown()[0].to_json()
    del row["tree"]["roles"]
    with pytest.raises(InputError) as refused:
        KeptTree.from_json(row)
    assert refused.value.field == "tree.roles"


def test_a_file_of_a_version_that_wrote_two_fields_more_is_read() -> None:
    """Both were always empty."""
    for tree in grown():
        row = json.loads(json.dumps(tree.to_json()))
        for decision in row["tree"]["decisions"]:
            decision["saw"] = None
        if row["credit"] is not None:
            row["credit"]["biased_forks"] = 0
        read = KeptTree.from_json(row)
        assert (read.tree.decisions, read.credit) == (tree.tree.decisions, tree.credit)


def test_the_prompt_holds_the_task_itself(tmp_path: Path) -> None:
    (tree, *_) = grown()
    root = tree.tree[tree.tree.roots[0]]
    assert root.messages and root.messages[0].role == "user"


def test_what_audits_read_from_trees_is_what_they_read_from_the_rollout_log(tmp_path: Path) -> None:
    written = grown()
    write_lines(tmp_path / "trees.jsonl", (tree.to_json() for tree in written))
    for one, other in zip(written, trees.read(tmp_path / "trees.jsonl"), strict=True):
        assert other.group() == group_from_tree(one.tree, one.rewards, id=one.id, iteration=1, task_type="walk")


@given(st.integers(1, 200), st.none() | st.integers(0, 250))
def test_as_many_iterations_as_were_asked_for_are_kept_and_the_last_among_them(
    iterations: int, keep: int | None
) -> None:
    kept = [n for n in range(1, iterations + 1) if trees.is_kept(n, iterations, keep)]
    assert len(kept) == (iterations if keep is None else min(keep, iterations))
    assert keep == 0 or kept[-1] == iterations


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("verdicts"), "field 'verdicts': is missing"),
        (lambda row: row.update(schema="other/1"), "is 'other/1', not 'turntree.trees/1'"),
        (lambda row: row["tree"]["nodes"][1].update(parent=99), "is not a rollout tree"),
        (lambda row: row["tree"]["nodes"][1].update(logprobs=[0.0]), "is not a rollout tree"),
        (lambda row: row.update(tree=[]), "field 'tree'"),
        (lambda row: row["tree"].update(task_id=None), "field 'tree.task_id': None is not of type str"),
        (lambda row: row["tree"]["nodes"][1].update(token_ids=["a"]), "token_ids are not whole numbers"),
        (lambda row: row["tree"]["nodes"][1].update(cost={"turns": "1"}), "field 'turns'"),
        (lambda row: row["verdicts"].popitem(), "do not label exactly its leaves"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, change, said: str) -> None:
    rows = [json.loads(json.dumps(tree.to_json())) for tree in grown(2)]
    change(rows[1])
    path = tmp_path / "trees.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=said) as caught:
        list(trees.read(path))
    assert (caught.value.path, caught.value.line) == (path, 2)
