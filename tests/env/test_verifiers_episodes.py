"""verifiers 0.4, whose environments run whole agents: each episode is a session behind a gateway.

`make test-environments` runs this with the real package.
"""

from __future__ import annotations

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")

from gateway_world import SAMPLING, engine, renderer, spelled, tokenizer

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.env.tasks import open_tasks
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import grow

TASKS = '''
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

class Sums(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if TOOLS else []

    @vf.reward
    async def right(self, trace) -> float:
        if self.data.answer == "broken":
            raise RuntimeError("no judge")
        said = [m for m in trace.branches[-1].messages if m.role == "assistant"]
        return float(self.data.answer in str(said[-1].content))

class SumSet(vf.Taskset[Sums, vf.TasksetConfig]):
    def load(self):
        for n in range(30):
            yield Sums(Sum(prompt=f"What is {n} + {n}?", answer=ANSWER or str(2 * n)))

__all__ = ["SumSet"]

if __name__ == "__main__":
    Adder.run()
'''


def played(tmp_path, monkeypatch, module, policy, *, tools=False, answer="", source=TASKS):
    (tmp_path / f"{module}.py").write_text(f"TOOLS, ANSWER = {tools}, {answer!r}\n{source}")
    monkeypatch.chdir(tmp_path)
    with open_tasks(Part(f"verifiers:{module}", {"seconds": 600.0}), {"train": 1}) as opened:
        tasks = opened.of("train")
        ((tree, rewards),) = grow(
            tasks, engine(policy), renderer(), EpisodeConfig(sampling=SAMPLING), group_size=2, seed=0
        )
    return tree, [verdict.reward for verdict in rewards.verdicts.values()]


def doubled(prompt):
    """The right answer to the last sum that a prompt asks for."""
    return str(2 * int(tokenizer().decode(prompt).rpartition("What is ")[2].split()[0]))


def test_an_episode_is_a_session_whose_reward_is_the_tasks(tmp_path, monkeypatch):
    def policy(prompt, seed):
        return spelled(doubled(prompt) if seed % 2 else "no idea")

    tree, rewards = played(tmp_path, monkeypatch, "sums_of_mine", policy)
    said = [tokenizer().decode(node.token_ids) for node in tree if node.sampled]
    assert len(said) == 2 and set(rewards) <= {0.0, 1.0}
    assert sum(rewards) == sum("no idea" not in one for one in said)


def test_tools_of_a_task_are_called_and_their_answers_are_given_nodes(tmp_path, monkeypatch):
    call = Message("assistant", "", (ToolCall("adder_add", {"a": 1, "b": 1}, "c1"),))

    def policy(prompt, seed):
        text = tokenizer().decode(prompt)
        return spelled(doubled(prompt)) if "<|tool|>" in text else renderer().completion(call)

    tree, rewards = played(tmp_path, monkeypatch, "tool_sums", policy, tools=True)
    assert rewards == [1.0, 1.0] and len([node for node in tree if node.sampled]) == 4


def test_an_episode_with_an_error_has_no_reward(tmp_path, monkeypatch):
    _, rewards = played(tmp_path, monkeypatch, "broken_sums", lambda prompt, seed: spelled("4"), answer="broken")
    assert rewards == [None, None]


def test_tools_that_nothing_would_serve_are_refused_before_anything_is_played(tmp_path, monkeypatch):
    source = TASKS.partition("if __name__")[0]
    with pytest.raises(InputError, match="unserved_sums") as refused:
        played(tmp_path, monkeypatch, "unserved_sums", None, tools=True, source=source)
    assert refused.value.field == "environment" and "Adder.run()" in refused.value.hint


def test_what_is_not_installed_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not_there"), open_tasks(Part("verifiers:not_there"), {"train": 1}):
        pass
