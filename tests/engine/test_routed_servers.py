"""The experts that a server says it computed tokens with: from its answer to the update, or a named fault."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm import STOP, TOKENIZER, request, sampling

from completions_server import completion
from fake_vllm import FakeVllm
from routed import TellsPlaces, are_places, as_vllm, mixed, routed_at_random
from tiny_models import tiny_mixture, tiny_model
from token_world import EPISODES, TokenRenderer, TokenWorld, WatchedEngine
from turntree.core.completion import Completion
from turntree.core.errors import InputError, TurntreeError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.messages import Message
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.decide.branching.rules import RandomBrancher
from turntree.engine.answers import AnswerReader, Unusable, answer_of
from turntree.logs import trees
from turntree.logs.trees import KeptTree
from turntree.pack.packing import pack
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.rollout.spread import labelled, unlabelled
from turntree.run.jsonl import write_lines
from turntree.train.forward import slot_scores

PROMPT = tuple(range(10, 30))
SAID = Message("assistant", "")


def contrary() -> FakeVllm:
    """A server whose routers choose what the policy's would choose last, with the policy's weights for it: as if it
    rounded very badly."""
    fake = FakeVllm(tiny_mixture())
    fake.routed = True
    for layer in mixed(fake.model).values():

        def choose(states: torch.Tensor, gate: Any = layer.gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = states @ gate.weight.T
            least = logits.softmax(-1).topk(2, largest=False)
            return logits, least.values, least.indices

        layer.gate.forward = choose
    return fake


def sampled(ids: tuple[int, ...], routes: str) -> Completion:
    zeros = (0.0,) * len(ids)
    return Completion(token_ids=ids, logprobs=zeros, entropies=zeros, finish="length", routes=tuple(routes))


def two_turns(engine: Any) -> RolloutTree:
    """Three rollouts of one prompt, of which the first goes on behind an answer of the environment."""
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, PROMPT).id
    asked = [request(number, PROMPT) for number in range(3)]
    first, *others = [tree.add_completion(root, found, SAID) for found in engine.generate(asked)]
    observed = tree.add(first.id, NodeKind.OBSERVATION, (40, 41, 42)).id
    path = (*PROMPT, *first.token_ids, 40, 41, 42)
    (later,) = engine.generate([request(7, path)])
    for node in (*others, tree.add_completion(observed, later, SAID, shared=2)):
        tree.stop(node.id, StopReason.COMPLETED)
    return tree


def credited(tree: RolloutTree) -> Credit:
    nodes = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    return Credit(nodes, rollout_tokens=1.0, rollouts=1.0, zero_variance=False)


def test_with_the_servers_routes_the_update_has_its_log_probabilities() -> None:
    with sampling(contrary(), model=tiny_mixture()) as engine:  # its probes are scored with the routes, too
        tree = two_turns(engine)
    (batch,) = pack([tree], [credited(tree)], max_tokens=4096)
    replayed = slot_scores(tiny_mixture(), batch).logprobs_S[batch.slot_T]
    torch.testing.assert_close(replayed.double(), batch.sampling_logprobs_T, atol=1e-4, rtol=0)
    for node in tree:
        ends_below = node.sampled and not tree.children(node.id)
        assert len(tree.routes(node.id)) == len(node.token_ids) - ends_below, "all but the last token of a rollout"
    assert batch.stats.replayed_tokens >= batch.stats.unique_tokens - 3


def test_a_server_that_keeps_its_routes_to_itself_has_other_log_probabilities() -> None:
    fake = contrary()
    fake.routed = False
    with pytest.raises(TurntreeError, match="other weights"), sampling(fake, model=tiny_mixture()):
        pass


def test_a_prompt_keeps_the_routes_of_its_first_completion() -> None:
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1, 2)).id
    for told in ("aaa", "bbb"):
        tree.add_completion(root, sampled((3, 4), told), SAID)
    assert ["".join(tree.routes(node.id)) for node in tree] == ["aa", "a", "b"]


def test_a_later_turn_may_tell_only_what_is_new() -> None:
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1, 2)).id
    first = tree.add_completion(root, sampled((3, 4), "abc"), SAID).id
    asked = tree.add(first, NodeKind.OBSERVATION, (5, 6)).id
    for told in ("defg", "xydefg", "abcdefg"):
        again = RolloutTree.from_json(tree.to_json())
        again.add_completion(asked, sampled((7, 8), told), SAID)
        assert ["".join(again.routes(node.id)) for node in again] == ["ab", "cd", "ef", "g"]
    tree.add_completion(asked, sampled((7, 8), "fg"), SAID)  # between what is known and what is told is a gap
    assert ["".join(tree.routes(node.id)) for node in tree] == ["ab", "c", "", "g"]


def test_the_routes_of_a_prompt_that_is_not_known_yet_are_those_of_the_root() -> None:
    tree, whole = RolloutTree("task"), RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, ()).id
    for told in ("abc", "xyz"):
        tree.add_completion(root, sampled((3, 4), told), SAID)
    later = tree.add_completion(tree.add(1, NodeKind.OBSERVATION, (5,)).id, sampled((6, 7), "abcdef"), SAID)
    assert ["".join(tree.routes(node.id)) for node in tree] == ["ab", "cd", "z", "e", "f"]
    for node in (whole.add(None, NodeKind.PROMPT, (1, 2)), *list(tree)[1:]):
        if node.id:
            more = {"logprobs": node.logprobs, "entropies": node.entropies}
            whole.add(node.parent, node.kind, node.token_ids, **more)
    whole.take_routes(tree, {node: node for node in range(later.id)})
    assert ["".join(whole.routes(node.id)) for node in whole] == ["ab", "cd", "z", "e", ""]


class Routed(TellsPlaces, WatchedEngine):
    pass


def test_the_groups_of_a_run_have_the_routes_of_every_branch_and_of_their_prompt() -> None:
    settings = SchedulerConfig(episodes=EPISODES, group_size=6, initial_rollouts=3)
    forks = RandomBrancher(rate=0.6, probe_tokens=2, branches=2)
    grown = list(Scheduler(Routed(), TokenRenderer(), settings, brancher=forks).run([TokenWorld("a")], seed=1))
    assert all(are_places(group.tree) for group in grown) and any(group.tree.branch_points() for group in grown)


def test_routes_survive_the_disk_and_other_processes(tmp_path: Path) -> None:
    with sampling(contrary(), model=tiny_mixture()) as engine:
        tree = two_turns(engine)
    told = [tree.routes(node.id) for node in tree]
    assert any(told)
    rewards = Rewards({leaf: Verdict(1.0, "") for leaf in tree.leaves()})
    sent, _ = unlabelled(json.loads(json.dumps(labelled(tree, rewards))))
    write_lines(tmp_path / "trees.jsonl", [KeptTree(id="1", iteration=1, tree=tree, rewards=rewards).to_json()])
    (kept,) = trees.read(tmp_path / "trees.jsonl")
    for back in (sent, kept.tree):
        assert [back.routes(node.id) for node in back] == told


@pytest.mark.parametrize("wrong", [{"0": [1]}, {"99": ["AAAA"]}, {"0": "AAAA"}, {"x": []}, 3])
def test_a_damaged_line_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    tree = routed_at_random(tiny_mixture(), RolloutTree("task"))
    tree.add(None, NodeKind.PROMPT, (1, 2, 3))
    row = KeptTree(id="1", iteration=1, tree=tree, rewards=Rewards({})).to_json()
    row["tree"]["routes"] = wrong
    write_lines(tmp_path / "trees.jsonl", [row])
    with pytest.raises(InputError) as refused:
        list(trees.read(tmp_path / "trees.jsonl"))
    assert refused.value.line == 1


RIGHT = np.ones((len(PROMPT) + 2, 2, 2), np.uint8)
WRONG = {
    "a token too few": as_vllm(RIGHT[:-1]),
    "a token too many": as_vllm(np.concatenate([RIGHT, RIGHT[:1]])),
    "a layer too few": as_vllm(RIGHT[:, :1]),
    "no numbers of experts": as_vllm(RIGHT.astype(np.float32)),
    "an expert that the model has not": as_vllm(RIGHT * 4),
    "an expert below 0": as_vllm(-RIGHT.astype(np.int32)),
    "turned around": as_vllm(np.asfortranarray(RIGHT)),
    "no base64": "?",
    "no array": base64.b64encode(b"experts").decode(),
    "cut off": base64.b64encode(base64.b64decode(as_vllm(RIGHT))[:-1]).decode(),
    "larger than it is": base64.b64encode(base64.b64decode(as_vllm(RIGHT)).replace(b"(22,", b"(99,")).decode(),
    "objects": base64.b64encode(base64.b64decode(as_vllm(RIGHT)).replace(b"|u1", b"|O ")).decode(),
    "no text": [1, 2],
}


def in_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def read(told: Any, mixture: tuple[int, int, int] = (2, 2, 4)) -> Completion:
    reported = {"tokens": ["token_id:7"] * 3, "token_logprobs": [-0.1] * 3, "top_logprobs": None}
    choice = {"token_ids": [7, 7, 7], "routed_experts": told}
    reader = AnswerReader(TOKENIZER, {STOP})
    reader.mixture = mixture
    answer = answer_of(json.dumps(completion("a", reported, "length", **choice)))
    return reader.read(request(0, PROMPT, max_tokens=3), answer, 0, 128)


@pytest.mark.parametrize("name", WRONG)
def test_routes_that_are_none_are_an_unusable_answer(name: str) -> None:
    with pytest.raises(Unusable, match="expert"):
        read(WRONG[name])


def test_routes_are_kept_in_a_byte_or_two_an_expert() -> None:
    assert read(as_vllm(RIGHT)).routes == (in_text(b"\1\1\1\1"),) * 22
    assert read(as_vllm(RIGHT.astype(np.uint16) * 300), (2, 2, 512)).routes == (in_text(b"\x2c\1" * 4),) * 22
    assert read(None).routes == read(as_vllm(RIGHT), (0, 0, 0)).routes == (), "not told, and of a model without experts"


def test_a_dense_policy_asks_nothing_of_its_server() -> None:
    with sampling(FakeVllm(tiny_model())) as engine:
        (found,) = engine.generate([request()])
    assert found.routes == ()
