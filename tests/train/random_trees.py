"""Random scored trees for the parity tests: chains, forks, one-turn groups, and coincidences of every kind."""

from __future__ import annotations

import random

import torch

from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict

ALPHABET = range(2, 9)  # few tokens, so that siblings coincide often


def ids(draw: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw.choice(ALPHABET) for _ in range(draw.randint(low, high)))


def add_completion(tree: RolloutTree, parent: int, token_ids: tuple[int, ...]) -> int:
    zeros = (0.0,) * len(token_ids)
    return tree.add(parent, NodeKind.COMPLETION, token_ids, logprobs=zeros, entropies=zeros).id


def one_turn(draw: random.Random, actions: int = 6, prompt: tuple[int, ...] = ()) -> RolloutTree:
    """One state, short actions: equal ones, and ones that begin alike."""
    tree = RolloutTree("one turn")
    root = tree.add(None, NodeKind.PROMPT, prompt or ids(draw, 2, 6)).id
    said = [ids(draw, 1, 4) for _ in range(actions - 2)]
    for token_ids in (*said, said[0], said[1][:1] + ids(draw, 1, 3)):
        add_completion(tree, root, token_ids)
    return tree


def episodes(draw: random.Random) -> RolloutTree:
    """Multi-turn chains that fork after observations and, now and then, repeat a sibling's words exactly."""
    tree = RolloutTree("episodes")
    frontier = [(tree.add(None, NodeKind.PROMPT, ids(draw, 2, 5)).id, 0)]
    while frontier:
        parent, turn = frontier.pop(0)
        said: list[tuple[int, ...]] = []
        for _ in range(draw.randint(2, 3) if turn < 2 else 1):
            token_ids = draw.choice(said) if said and draw.random() < 0.3 else ids(draw, 1, 4)
            said.append(token_ids)
            node = add_completion(tree, parent, token_ids)
            if turn < 2 and draw.random() < 0.6:
                observed = tree.add(node, NodeKind.OBSERVATION, draw.choice([(3, 4), ids(draw, 1, 3)])).id
                frontier.append((observed, turn + 1))
    return tree


def expert_trace(draw: random.Random) -> RolloutTree:
    """Two states of one demonstration; at the first, one sampled action repeats the expert's words and another
    begins with them, so that trained and untrained tokens share slots."""
    tree = RolloutTree("expert trace")
    state = tree.add(None, NodeKind.PROMPT, ids(draw, 2, 5)).id
    expert = ids(draw, 2, 3)
    for token_ids in (expert, expert[:1] + ids(draw, 1, 2), ids(draw, 1, 4), expert):
        add_completion(tree, state, token_ids)
    later = tree.add(state, NodeKind.PROMPT, expert + ids(draw, 1, 3)).id
    for _ in range(3):
        add_completion(tree, later, ids(draw, 1, 3))
    return tree


def score(draw: random.Random, tree: RolloutTree, *, censor: bool = True) -> Rewards:
    """Stop every leaf; random rewards, one leaf in eight censored by an error."""
    verdicts: dict[int, Verdict] = {}
    for leaf in tree.leaves():
        censored = censor and draw.random() < 0.125
        tree.stop(leaf, StopReason.ENVIRONMENT_ERROR if censored else StopReason.COMPLETED)
        verdicts[leaf] = Verdict(None if censored else draw.choice([0.0, 0.0, 1.0, 0.25]), "random")
    return Rewards(verdicts)


def scored_trees(draw: random.Random) -> tuple[list[RolloutTree], list[Rewards]]:
    """One tree of each shape, a second state of the first one's trace, and a tree whose leaves have equal rewards."""
    first = one_turn(draw)
    later = one_turn(draw, prompt=first[0].token_ids + ids(draw, 2, 4))
    trees = [first, later, episodes(draw), expert_trace(draw), one_turn(draw, actions=4)]
    rewards = [score(draw, tree) for tree in trees]
    rewards[-1] = Rewards({leaf: Verdict(1.0 if v.reward is not None else None, "equal")
                           for leaf, v in rewards[-1].verdicts.items()})  # fmt: skip
    return trees, rewards


def sampled_near(model: torch.nn.Module, tree: RolloutTree, draw: random.Random, spread: float) -> RolloutTree:
    """The same tree as if sampled by policies around `model`: each sampling event gets log-probabilities of its own
    (siblings with equal tokens too), so that ratios fall on both sides of the clip range."""
    value = tree.to_json()
    for node in tree:
        if node.sampled:
            path = [token for part in tree.path(node.id) for token in part.token_ids]
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=torch.tensor([path])).logits[0, :-1].double(), -1)
            own = range(len(path) - len(node.token_ids), len(path))
            drift = draw.gauss(0.0, spread)
            value["nodes"][node.id]["logprobs"] = [
                float(scores[t - 1, path[t]]) + drift + draw.gauss(0.0, spread) for t in own
            ]
            value["nodes"][node.id]["policy_version"] = draw.randint(0, 3)
    return RolloutTree.from_json(value)
