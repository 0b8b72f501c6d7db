"""Local rollouts: one sampled turn at a state inside an expert trace (PivotRL, section 2 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turntree.core import seeds
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Engine, Renderer, TurnState, TurnVerifier
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict


@dataclass(frozen=True)
class Prompted:
    """A candidate with its prompt already in tokens (rendered once, sampled many times)."""

    state: TurnState
    prompt_ids: tuple[int, ...]


def render(state: TurnState, renderer: Renderer) -> Prompted:
    return Prompted(state, renderer.prompt(state.history, state.tools))


def local_request(
    item: Prompted, sampling: Sampling, *, seed: int, sample: int, occurrence: int = 0
) -> GenerationRequest:
    """The request for one sample at a state. Its draws depend on `seed`, the state's id and these numbers only."""
    key = seeds.derive(seed, "local", item.state.id, occurrence, sample)
    return GenerationRequest(prompt_ids=item.prompt_ids, sampling=sampling, seed=key)


def sample_local(
    prompted: Sequence[Prompted],
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    group_size: int,
    seed: int,
) -> list[RolloutTree]:
    """`group_size` sampled actions at every state, as trees of one prompt node and one-turn leaves (one wave).

    The draws of (state, sample) depend on `seed`, the state's id and the sample's number only. A state may occur
    several times in one wave; its occurrences are numbered.
    """
    occurrences: dict[str, int] = {}
    requests: list[GenerationRequest] = []
    for item in prompted:
        occurrence = occurrences.get(item.state.id, 0)
        occurrences[item.state.id] = occurrence + 1
        for sample in range(group_size):
            requests.append(local_request(item, sampling, seed=seed, sample=sample, occurrence=occurrence))
    completions = iter(engine.generate(requests))
    trees: list[RolloutTree] = []
    for item in prompted:
        tree = RolloutTree(item.state.id)
        root = tree.add(None, NodeKind.PROMPT, item.prompt_ids, messages=item.state.history)
        for _ in range(group_size):
            completion = next(completions)
            leaf = tree.add_completion(root.id, completion, renderer.parse(completion.token_ids))
            tree.stop(leaf.id, StopReason.COMPLETED if completion.finish == "stop" else StopReason.MAX_TOKENS)
        trees.append(tree)
    return trees


def score_local(tree: RolloutTree, state: TurnState, verifier: TurnVerifier) -> Rewards:
    """The verifier's verdict on every leaf. Equal actions are judged once."""
    verdicts: dict[int, Verdict] = {}
    seen: dict[Message, Verdict] = {}
    for leaf in tree.leaves():
        action = tree[leaf].message
        assert action is not None
        key = Message("assistant", repr((action.content, action.tool_calls)))  # arguments are unhashable mappings
        if key not in seen:
            seen[key] = verifier.judge(state, action)
        verdicts[leaf] = seen[key]
    rewards = Rewards(verdicts)
    rewards.check(tree)
    return rewards
