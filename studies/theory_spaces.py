"""The finite action spaces of a trained policy, and gradients on them, for `experiments.theory`.

At a state of an expert's trace the distinct actions among some samples are the action space, with the policy's own
probabilities, rescaled to sum to 1.

    A  actions of a state     P  parameters     R  rows
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from configs import TheoryConfig
from numpy.typing import NDArray

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.protocols import TurnVerifier
from turntree.core.tree import Node, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.experiments.config import COMMAND
from turntree.pack.packing import pack
from turntree.rollout.local import Limits, Prompted, sample_local, score_wave, that_fit
from turntree.stages.candidates import read_candidates
from turntree.stages.demonstrate import demonstrate
from turntree.stages.policy import Policy
from turntree.train.config import LossConfig
from turntree.train.forward import slot_scores
from turntree.train.lora import Reference
from turntree.train.losses import loss_normalizer
from turntree.train.update import batch_loss

Floats = NDArray[np.float64]
Vector = NDArray[np.float32]
Group = tuple[RolloutTree, Rewards]
_MAX_TOKENS = 8192


@dataclass
class Space:
    """The finite action space of a state: of each action its completion (a tree of one leaf), its probability, reward
    and tokens. `covered`: the probability of the actions before they were rescaled. `scores_AP`: gradients of the
    log-probabilities of the rescaled policy (none where nothing is compared)."""

    prompted: Prompted
    actions: list[RolloutTree]
    chances: Floats
    rewards: Floats
    lengths: Floats
    covered: float
    scores_AP: Vector | None = None

    @property
    def mixed(self) -> bool:
        return len(set(self.rewards)) > 1

    @property
    def mean(self) -> float:
        return float(self.chances @ self.rewards) if self.mixed else float(self.rewards[0])

    @property
    def variance(self) -> float:
        return self.mean * (1 - self.mean)

    @property
    def tokens(self) -> float:
        """Of a rollout, on average."""
        return float(self.chances @ self.lengths)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        return generator.choice(len(self.chances), size=size, p=self.chances)

    def group(self, drawn: Iterable[int]) -> Group:
        """A judged group of these actions."""
        tree = _planted(self.prompted)
        leaves = {_grow(tree, self.actions[each][1]): float(self.rewards[each]) for each in drawn}
        return tree, Rewards({leaf: Verdict(reward, "") for leaf, reward in leaves.items()})


# action spaces


def demonstrated(demonstrator: Part, policy: Policy, limits: Limits) -> list[Prompted]:
    """The candidates of a demonstrator's traces that can be sampled and trained on."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces.jsonl"
        demonstrate(demonstrator, traces)
        states = read_candidates(str(traces), "", 0, 0)
    return [item for _, item in that_fit(states, policy.renderer, limits)[0]]


def _states(config: TheoryConfig, policy: Policy) -> list[Prompted]:
    """Candidates spread over the demonstrated games."""
    limits = Limits(COMMAND.max_tokens, policy.engine.max_context, _MAX_TOKENS)
    fitting = demonstrated(config.demonstrator, policy, limits)
    step = max(1, len(fitting) // config.candidates)
    return fitting[::step][: config.candidates]


def spaces_of(policy: Policy, verifier: TurnVerifier, config: TheoryConfig) -> list[Space]:
    """Of every state that is sampled. Raises `InputError` for rewards that are not 0 or 1."""
    states = _states(config, policy)
    trees = sample_local(states, policy.engine, policy.renderer, COMMAND, config.samples, config.seed)
    judged = score_wave([(tree, item.state) for tree, item in zip(trees, states, strict=True)], verifier)
    return [_space(item, tree, rewards) for item, tree, rewards in zip(states, trees, judged, strict=True)]


def _space(prompted: Prompted, tree: RolloutTree, rewards: Rewards) -> Space:
    leaves = {tree[leaf].token_ids: leaf for leaf in rewards.scored()}
    found = [rewards.scored()[leaf] for leaf in leaves.values()]
    if not set(found) <= {0.0, 1.0}:
        raise InputError(f"gives rewards such as {max(found)}", field="verifier", hint="the theory is about 0 and 1")
    actions: list[RolloutTree] = []
    for leaf in leaves.values():
        actions.append(_planted(prompted))
        _grow(actions[-1], tree[leaf])
    mass = np.exp([math.fsum(tree[leaf].logprobs or ()) for leaf in leaves.values()])
    lengths = np.array([len(ids) for ids in leaves], dtype=float)
    return Space(prompted, actions, mass / mass.sum(), np.array(found), lengths, float(mass.sum()))


def _planted(prompted: Prompted) -> RolloutTree:
    tree = RolloutTree(prompted.state.id)
    tree.add(None, NodeKind.PROMPT, prompted.prompt_ids, messages=prompted.state.history)
    return tree


def _grow(tree: RolloutTree, action: Node) -> int:
    """A leaf with a completion of another tree."""
    node = tree.add(
        0,
        NodeKind.COMPLETION,
        action.token_ids,
        logprobs=action.logprobs,
        entropies=action.entropies,
        policy_version=action.policy_version,
        messages=action.messages,
    )
    tree.stop(node.id, StopReason.COMPLETED)
    return node.id


# gradients


def scores_of(policy: Policy, space: Space) -> Vector:
    """[A, P], of the rescaled policy: each score minus the mean score."""
    rows: list[Vector] = []
    for action in space.actions:
        (batch,) = pack([action], [_plain(action)], max_tokens=_MAX_TOKENS)
        slot_scores(policy.model, batch).logprobs_S.sum().backward()
        rows.append(pop_gradient(policy).numpy())
    scores = np.stack(rows)
    return np.asarray(scores - (space.chances.astype(np.float32) @ scores)[None], dtype=np.float32)


def _plain(tree: RolloutTree) -> Credit:
    """Every completion trained with weight 1."""
    nodes = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    tokens = sum(len(tree[node].token_ids) for node in nodes)
    return Credit(nodes=nodes, rollout_tokens=float(tokens), rollouts=float(len(nodes)), zero_variance=False)


@torch.no_grad()
def chances_now(policy: Policy, space: Space) -> Floats:
    """Of the rescaled policy, with the weights as they are now."""
    found = np.zeros(len(space.actions))
    for batch in pack(space.actions, [_plain(each) for each in space.actions], max_tokens=_MAX_TOKENS):
        logprobs_T = slot_scores(policy.model, batch).logprobs_S[batch.slot_T].double()
        np.add.at(found, batch.tree_A[batch.action_T].numpy(), logprobs_T.numpy())
    mass = np.exp(found - found.max())
    return mass / mass.sum()


def gradient_of(
    policy: Policy,
    groups: Sequence[Group],
    loss: LossConfig,
    credit: CreditConfig | None = None,
    reference: Reference | None = None,
) -> Vector:
    """Of minus the loss of a batch, as an update computes it."""
    estimator = loss.estimator(credit or CreditConfig())
    return gradient_by(policy, [tree for tree, _ in groups], [estimator(*group) for group in groups], loss, reference)


def gradient_by(
    policy: Policy,
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    loss: LossConfig,
    reference: Reference | None = None,
) -> Vector:
    """`gradient_of` for any credit. Without a `reference` the KL term is left out."""
    if reference is None:
        loss = replace(loss, kl_coefficient=0.0)
    batches = pack(trees, credits, max_tokens=_MAX_TOKENS)
    normalizer = loss_normalizer(batches, loss)
    for batch in batches:
        batch_loss(policy.model, reference, batch, loss, normalizer)[0].backward()
    return -pop_gradient(policy).numpy()


def cosine(one: Vector, other: Vector) -> float:
    """0 where there is no gradient."""
    lengths = float(np.linalg.norm(one.astype(float)) * np.linalg.norm(other.astype(float)))
    return float(one.astype(float) @ other.astype(float)) / lengths if lengths else 0.0


def inner_products(rows_RP: Vector, step: int = 1 << 16) -> Floats:
    """Inner products of the rows, [R, R], summed in double precision."""
    parts = (rows_RP[:, at : at + step].astype(float) for at in range(0, rows_RP.shape[1], step))
    return np.sum([part @ part.T for part in parts], axis=0)


@contextmanager
def moved(policy: Policy, step: Vector) -> Iterator[None]:
    """The weights moved by a vector [P], and afterwards back, bit for bit."""
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    before, left = [each.detach().clone() for each in parameters], torch.from_numpy(step)
    with torch.no_grad():
        for each in parameters:
            here, left = left[: each.numel()], left[each.numel() :]
            each += here.view_as(each)
    try:
        yield
    finally:
        with torch.no_grad():
            for each, old in zip(parameters, before, strict=True):
                each.copy_(old)


def pop_gradient(policy: Policy) -> torch.Tensor:
    """The gradients of all trained parameters, [P] in float32; the model then has none."""
    parts = [
        (torch.zeros_like(each) if each.grad is None else each.grad).flatten().float()
        for each in policy.model.parameters()
        if each.requires_grad
    ]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat(parts)
