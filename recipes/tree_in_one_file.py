"""Rollout trees in one file: grow, judge, credit, pack, learn. Nothing of turntree is imported.

An agent looks around, reads a note, goes to a room and takes a thing. At the start it can say commands, but not which
room a note means. A test compares loss, gradient and every decision with the library's.

    pivot     the turn of a demonstration at which samples differ: only there is a gradient      (PivotRL)
    fork      a rollout goes on twice where its entropy rose after a tool's answer               (ARPO)
    gate      a group whose rollouts have converged stops: equal rewards have no gradient        (Selective Rollout)
    credit    three numbers (P, N, m) of a node stand for all rollouts through it
    pack      every unique token is computed once, under a tree mask
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn  # shape suffixes: B rows, L slots (unique tokens), V vocabulary, T sampled tokens

COMMANDS = "find look around go take whistle softly note here nothing"
THINGS, NOTES = ["apple", "book", "key", "lamp"], ["one", "two", "three", "four"]
ROOM_OF = {"one": "attic", "two": "cellar", "three": "garden", "four": "kitchen"}
WORDS = [*COMMANDS.split(), *THINGS, *NOTES, *ROOM_OF.values()]
TASKS = [(thing, note) for thing in THINGS for note in NOTES]
TURNS, TURN_TOKENS = 3, 2  # an action is a verb and a noun
STARTS, GROUPS = 8, 8  # independent rollouts of a group, groups of a step
PROBE, RISE = 2, 0.1  # fork where the mean entropy of a turn's first tokens rose by this share of the possible
GATE_TURN, DIVERGENCE = 2, 0.1  # stop a group after this turn if its rollouts differ by less
SAMPLES, LAMBDA = 12, 0.6  # K samples at a turn of a demonstration; a pivot is passed less often than lambda
FAULTS, CLIP, STD_EPS = 0.02, 0.2, 1e-6  # how often a tool breaks; of GRPO


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def words(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def respond(task: tuple[str, str], actions: list[str]) -> str | None:
    """The answer to the last action; None: done. All state is in the actions, so that a branch needs no copy of it."""
    (thing, note), room = task, ROOM_OF[task[1]]
    answers = {"look around": f"note {note}", f"go {room}": f"here {thing}"}
    return None if actions[-2:] == [f"go {room}", f"take {thing}"] else answers.get(actions[-1], "nothing nothing")


@dataclass(frozen=True)
class Node:  # the tokens of one event: a prompt, an answer of the world, or one sampling event of the policy
    parent: int | None
    tokens: list[int]
    logprobs: list[float] | None = None  # at which they were sampled; None where they were not
    entropies: list[float] = field(default_factory=list)


@dataclass
class Tree:
    nodes: list[Node]  # parents first; and the rewards of leaves, where None is no reward, which is not zero
    rewards: dict[int, float | None] = field(default_factory=dict)

    def add(self, parent: int, *values: list) -> int:
        self.nodes.append(Node(parent, *values))
        return len(self.nodes) - 1

    def path(self, node: int | None) -> list[int]:
        return [] if node is None else [*self.path(self.nodes[node].parent), node]

    def tokens(self, node: int) -> list[int]:
        return [token for above in self.path(node) for token in self.nodes[above].tokens]


def is_pivot(rewards: list[float]) -> bool:
    """PivotRL: some samples pass, some fail, and the turn is not nearly mastered."""
    return max(rewards) > min(rewards) and fmean(rewards) < LAMBDA


def entropy_rose(entropies: list[float], first_turn: list[float]) -> bool:
    """ARPO: is the policy less certain after this answer than it was in its first turn?"""
    now, initial = (fmean(turn[:PROBE]) for turn in (entropies, first_turn))
    return (now - initial) / math.log(len(WORDS)) > RISE


def converged(rollouts: list[list[str]]) -> bool:
    """Selective Rollout: is the mean edit distance of two rollouts small? (Of two actions: the number that differ.)"""
    prefixes = [(actions + ["(ended)"] * GATE_TURN)[:GATE_TURN] for actions in rollouts]
    return fmean(a[turn] != b[turn] for a, b in combinations(prefixes, 2) for turn in range(GATE_TURN)) < DIVERGENCE


@torch.no_grad()
def sample(policy: Decoder, rows: list[list[int]], length: int, draw: torch.Generator) -> list[tuple[list, list, list]]:
    """The next tokens of each row (all of one length), their log-probabilities, the entropies they were drawn at."""
    tokens_BL, drawn = torch.tensor(rows), []
    for size in range(tokens_BL.shape[1], tokens_BL.shape[1] + length):
        logits_BLV = policy(tokens_BL, torch.arange(size).expand_as(tokens_BL), torch.ones(size, size).tril().bool())
        logprobs_BV = logits_BLV[:, -1].log_softmax(-1)
        token_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=draw)
        entropy_B1 = -(logprobs_BV.exp() * logprobs_BV).sum(-1, keepdim=True)
        drawn.append(torch.stack([token_B1, logprobs_BV.gather(1, token_B1), entropy_B1]))
        tokens_BL = torch.cat([tokens_BL, token_B1], dim=1)
    tokens, logprobs, entropies = torch.cat(drawn, dim=2).tolist()
    return [([int(t) for t in row], *others) for row, *others in zip(tokens, logprobs, entropies, strict=True)]


def profile(policy: Decoder, state: list[int], demonstrated: str, draw: torch.Generator) -> Tree:
    """K samples of one turn of a demonstration, judged as a turn, by the strictest verifier that there is."""
    tree = Tree([Node(None, state)])
    for sampled in sample(policy, [state] * SAMPLES, TURN_TOKENS, draw):
        tree.rewards[tree.add(0, *sampled)] = float(words(sampled[0]) == demonstrated)
    return tree


def grow(policy: Decoder, task: tuple[str, str], draw: torch.Generator, *, decide: bool = True) -> Tree:
    """A group of whole episodes as one tree; without `decide` nothing forks or stops."""
    tree = Tree([Node(None, ids(f"find {task[0]}"))])
    at, actions, may_fork = [0] * STARTS, [[] for _ in range(STARTS)], [decide] * STARTS  # of every rollout
    for turn in range(1, TURNS + 1):
        live = [i for i, node in enumerate(at) if node not in tree.rewards]
        # Branches share their beginning with a start, so that only the starts show whether the group has converged.
        if decide and turn == GATE_TURN + 1 and live and live[0] < STARTS and converged(actions[:STARTS]):
            tree.rewards, live = dict.fromkeys(at), []  # of those that ended too: which ones did is no accident
        if not live:
            break
        drawn = sample(policy, [tree.tokens(at[i]) for i in live], TURN_TOKENS, draw)
        for i, (tokens, logprobs, entropies) in zip(live, drawn, strict=True):
            shared = 0
            if turn > 1 and may_fork[i] and entropy_rose(entropies, tree.nodes[tree.path(at[i])[1]].entropies):
                # Nothing was drawn yet from the distribution of the probe's last entropy. So the branch shares the
                # tokens before it and draws that one itself: nothing below the fork took part in the decision.
                shared = PROBE - 1
                at[i] = tree.add(at[i], tokens[:shared], logprobs[:shared], entropies[:shared])
                (rest,) = sample(policy, [tree.tokens(at[i])], TURN_TOKENS - shared, draw)
                may_fork[i:] = [False, *may_fork[i + 1 :], False]  # once is enough
                actions.append([*actions[i], words(tokens[:shared] + rest[0])])
                at.append(tree.add(at[i], *rest))
            at[i] = tree.add(at[i], tokens[shared:], logprobs[shared:], entropies[shared:])
            actions[i].append(words(tokens))
        for i in (i for i, node in enumerate(at) if node not in tree.rewards):
            answer = respond(task, actions[i])
            if torch.rand(1, generator=draw) < FAULTS:
                tree.rewards[at[i]] = None  # a broken tool says nothing about the policy
            elif answer is None or turn == TURNS:
                tree.rewards[at[i]] = float(answer is None)
            else:
                at[i] = tree.add(at[i], ids(answer))
    return tree


def credit(tree: Tree) -> dict[int, list[float]]:
    """(P, N, m) of sampled nodes: the sum of the positive advantages A of the scored leaves below, that of the negative
    ones, their number. A token's ratio r is the same for all of them, so that it is computed once:
    sum over leaves of min(r A, clip(r) A)  =  P min(r, 1 + CLIP) + N max(r, 1 - CLIP)"""
    scored = {leaf: reward for leaf, reward in tree.rewards.items() if reward is not None}
    nodes: dict[int, list[float]] = {}
    for leaf, reward in scored.items():
        advantage = (reward - fmean(scored.values())) / (pstdev(scored.values()) + STD_EPS)
        for node in (node for node in tree.path(leaf) if tree.nodes[node].logprobs is not None):
            p, n, m = nodes.get(node, (0.0, 0.0, 0.0))
            nodes[node] = [p + max(advantage, 0.0), n + min(advantage, 0.0), m + 1]
    return nodes


def pack(trees: list[Tree]) -> tuple[Tensor, ...]:
    """All trees in one row. A slot is a token behind a given beginning: it sees that and no sibling, and rollouts share
    it. Terms are not merged: nodes that sampled the same tokens keep their own log-probabilities and credit."""
    terms = []
    for number, tree in enumerate(trees):
        for node, numbers in credit(tree).items():
            path, logprobs = (number, *tree.tokens(node)), tree.nodes[node].logprobs
            before = len(path) - len(logprobs)
            terms += [(path[: before + i], old, numbers) for i, old in enumerate(logprobs, start=1)]
    slots = sorted({path[:end] for path, _, _ in terms for end in range(2, len(path) + 1)})  # in depth-first order
    place = {slot: i for i, slot in enumerate(slots)}
    visible_LL = torch.tensor([[slot[: len(other)] == other for other in slots] for slot in slots])
    tokens_L, depths_L = torch.tensor([(slot[-1], len(slot) - 2) for slot in slots]).T
    # A term is predicted by the slot above it on its path, which need not be the slot before it in the row.
    slot_T, above_T = torch.tensor([(place[path], place[path[:-1]]) for path, _, _ in terms]).T
    old_T, credit_T3 = (torch.tensor([term[i] for term in terms], dtype=torch.float64) for i in (1, 2))
    return tokens_L, depths_L, visible_LL, slot_T, above_T, old_T, credit_T3


def loss(policy: Decoder, trees: list[Tree]) -> Tensor:
    """GRPO's clipped objective, the mean over the sampled tokens of all rollouts, from one pass over unique tokens."""
    tokens_L, depths_L, visible_LL, slot_T, above_T, old_T, credit_T3 = pack(trees)
    logprobs_LV = policy(tokens_L[None], depths_L[None], visible_LL)[0].log_softmax(-1)
    ratio_T = torch.exp(logprobs_LV[above_T, tokens_L[slot_T]] - old_T.to(logprobs_LV))
    p_T, n_T, m_T = credit_T3.to(logprobs_LV).T
    return -(p_T * ratio_T.clamp(max=1 + CLIP) + n_T * ratio_T.clamp(min=1 - CLIP)).sum() / m_T.sum()


class Decoder(nn.Module):  # a small transformer that takes any mask, and its optimizer
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(WORDS), 48), nn.Embedding(32, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 192, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, len(WORDS))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, visible_LL: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens_BL) + self.place(positions_BL), mask=~visible_LL))

    def step(self, value: Tensor) -> None:
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()


def learn_to_speak(policy: Decoder) -> None:
    """Supervised, on episodes that go to all rooms alike."""
    rows = [f"find {t} look around note {n} go {to} here {t} take {t}" for t, n in TASKS for to in ROOM_OF.values()]
    tokens_BL, visible_LL = torch.tensor([ids(row) for row in rows]), torch.ones(12, 12).tril().bool()
    for _ in range(180):
        logits_BLV = policy(tokens_BL, torch.arange(12).expand_as(tokens_BL), visible_LL)[:, :-1]
        policy.step(nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten()))


def success(policy: Decoder, draw: torch.Generator) -> float:
    trees = [grow(policy, task, draw, decide=False) for task in TASKS]
    return fmean(reward for tree in trees for reward in tree.rewards.values() if reward is not None)


def train(steps: int, seed: int, log=print) -> tuple[float, float]:
    """Success before and after."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # faster than many, for a model this small
    policy, draw, pivots = Decoder(), torch.Generator().manual_seed(seed), []
    learn_to_speak(policy)
    for task, last in ((TASKS[0], "take apple"), (TASKS[6], "whistle softly")):  # two demonstrations
        state, actions = ids(f"find {task[0]}"), ["look around", f"go {ROOM_OF[task[1]]}", last]
        for turn, action in enumerate(actions, start=1):
            rewards = list(profile(policy, state, action, draw).rewards.values())
            log(f"{action:15} {sum(rewards):3.0f} of {SAMPLES} samples pass{', a pivot' * is_pivot(rewards)}")
            pivots += [(state, action)] * is_pivot(rewards)
            state = state + ids(f"{action} {respond(task, actions[:turn]) or ''}")
    before = success(policy, draw)
    for number in range(1, steps + 1):
        groups = [grow(policy, TASKS[i], draw) for i in torch.randperm(len(TASKS), generator=draw)[:GROUPS]]
        policy.step(loss(policy, groups + [profile(policy, state, action, draw) for state, action in pivots]))
        if number % 20 == 0:
            forks, stopped = sum(len(t.rewards) - STARTS for t in groups), sum(not credit(t) for t in groups)
            log(f"step {number:3}: {forks} forks, {stopped} of {GROUPS} groups stopped")
    after = success(policy, draw)
    log(f"success before {before:.2f}, after {after:.2f}")
    return before, after


if __name__ == "__main__":
    train(steps=80, seed=0)
