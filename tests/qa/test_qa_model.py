"""The embedded question-answering policy is mediocre, brief, and writes calls that are understood."""

from pathlib import Path

import pytest

import turntree_worlds
from turntree.core.completion import Sampling
from turntree.core.messages import Message
from turntree.core.tree import NodeKind
from turntree.env.tools.runtime import ToolRuntime
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import grow
from turntree.stages.policy import Device, Policy, load_policy
from turntree_worlds.qa.build import QaWorld
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.experts import answer, compute, search

FOLDER = Path(turntree_worlds.__file__).parent / "models" / "qa_tiny"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(str(FOLDER), Device())


def test_it_is_small_and_has_a_card() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000
    assert "# qa_tiny" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_it_answers_some_questions_of_an_unseen_world(policy: Policy, world: QaWorld, tools: ToolRuntime) -> None:
    tasks = [QaEnvironment(posed.question, tools) for posed in world.questions("dev", 30)]
    config = EpisodeConfig(max_turns=12, max_context=1200, sampling=Sampling(max_tokens=32))
    groups = grow(tasks, policy.engine, policy.renderer, config, group_size=2, seed=0)
    leaves = [
        (tree.path(leaf), verdict.reward) for tree, rewards in groups for leaf, verdict in rewards.verdicts.items()
    ]
    rewards = [reward for _, reward in leaves if reward is not None]
    assert len(rewards) == 60, "nothing is censored"
    assert 0.2 < sum(reward >= 1 for reward in rewards) / 60 < 0.7
    lengths = sorted(sum(len(node.token_ids) for node in path) for path, _ in leaves)
    assert lengths[30] < 450
    said = [node.message for path, _ in leaves for node in path if node.kind is NodeKind.COMPLETION and node.message]
    assert {call.name for message in said for call in message.tool_calls} == {"search", "python"}


def test_prompts_calls_and_answers_take_few_tokens(policy: Policy, tools: ToolRuntime) -> None:
    renderer = policy.renderer
    assert len(renderer.completion(search("mother of Ada Nash"))) == 7, "a token each word, and three around them"
    assert len(renderer.completion(answer("Ada Nash"))) == 5
    assert len(renderer.completion(compute("abs(1950-1990)"))) <= 10
    assert len(renderer.prompt([Message("user", "Who is the mayor of Alden?")], tools.schemas)) <= 16


def test_calls_are_read_as_they_were_said(policy: Policy) -> None:
    for said in (search("mother of Ada Nash"), compute("abs(1950-1990)"), answer("Ada Nash")):
        assert policy.renderer.parse(policy.renderer.completion(said)) == said
