"""Rows: credited trees for a trainer that takes flat sequences, with one advantage a token.

A tree becomes one row for each rollout, cut after its last trained token. A node that several rollouts share is trained
in the first of its rows only, with its whole credit, and is context in the others. So with

    loss = - (sum over rows and tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)) / Z

over the tokens of the rows, r = pi / pi_old, loss and gradient are those of the packed trees (`train.losses` with token
ratios and no KL term), as long as the old policy is the one that sampled (`logprobs`); where a trainer rescored, it
weighs by its own ratio. A clip treats P and N of a node differently, so where a node has both, N comes in a further
row. Law: tests/train/test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import RolloutTree
from turntree.pack.slots import begins_sampled, trained_paths


@dataclass(frozen=True)
class Row:
    """A prompt with what follows it, of T tokens. The last six fields are aligned, [T]; `logprobs`, `advantages` and
    `multiplicities` are 0 where nothing is trained.

    `multiplicities` weigh the KL term and the normaliser; they are 0 in a further row for N, so that each sampled token
    counts once. `policy_version` is the oldest of the trained tokens' versions (None: not recorded).
    """

    task_id: str
    tree: int  # position of the tree among those given
    policy_version: int | None
    tokens: tuple[int, ...]
    nodes: tuple[int, ...]  # the node of the tree that each token is of
    mask: tuple[bool, ...]  # trained in this row
    logprobs: tuple[float, ...]  # by the policy that sampled the token
    advantages: tuple[float, ...]  # the same on every token of a node; not divided by Z
    multiplicities: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def rows(trees: Sequence[RolloutTree], credits: Sequence[Credit], *, clipped: bool = True) -> list[Row]:
    """The rows of all trees, in order. A trained token has one row; with a clip, a node whose P and N are both not 0
    has a second one, for N. Without a clip (`clipped=False`: a loss that is linear in the advantage) it has P + N.

    Rows whose advantages are all 0 are kept, because a KL term and the normaliser (`LossConfig.divisor`) count them.
    Raises ValueError where a node that was not sampled has credit, `InputError` where a tree begins with such tokens.
    """
    made: list[Row] = []
    for number, (tree, credit) in enumerate(zip(trees, credits, strict=True)):
        if not clipped:
            made += _rows(tree, credit, number, lambda c: c.positive + c.negative)
            continue
        made += _rows(tree, credit, number, lambda c: c.positive or c.negative)
        both = {node: replace(c, multiplicity=0.0) for node, c in credit.nodes.items() if c.positive and c.negative}
        made += _rows(tree, replace(credit, nodes=both), number, lambda c: c.negative)
    return made


def _rows(tree: RolloutTree, credit: Credit, number: int, advantage: Callable[[NodeCredit], float]) -> Iterable[Row]:
    """A row for each path, which trains the nodes that no earlier one trained."""
    seen: set[int] = set()
    for path in trained_paths(tree, credit):
        if next((node.id for node in path if node.token_ids), None) in credit.nodes:
            raise begins_sampled(tree)
        trained = {n.id: credit.nodes[n.id] for n in path if n.id in credit.nodes and n.id not in seen}
        seen |= trained.keys()
        versions = [node.policy_version for node in path if node.id in trained and node.policy_version is not None]

        cells: list[tuple[int, int, bool, float, float, float]] = []  # the aligned fields of each token
        for node in path:
            of = trained.get(node.id)
            logprobs = (node.logprobs if of else None) or (0.0,) * len(node.token_ids)
            labels = (advantage(of), of.multiplicity) if of else (0.0, 0.0)
            cells += [(t, node.id, of is not None, lp, *labels) for t, lp in zip(node.token_ids, logprobs, strict=True)]
        yield Row(tree.task_id, number, min(versions, default=None), *zip(*cells, strict=True))
