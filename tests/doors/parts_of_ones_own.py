"""What a user of turntree would write: every kind of part, in modules of their own. The suites put the text of these
modules into a folder (`test_module_object.py`) or into a package (`test_wheel.py`)."""

from pathlib import Path

# An environment of 30 lines. It speaks household's words because the embedded policy knows no others.
ROOMS = '''
from turntree.core.messages import Message
from turntree.core.protocols import Observation

WORDS = "look inventory go".split()

class Room:
    """Say something that begins with the word that is wanted; the answer tells how long it was, roughly."""

    tools = ()

    def __init__(self, number, turns):
        self.task_id, self.task_type = f"room-{number}", WORDS[number % len(WORDS)]
        self.left = turns

    def reset(self):
        return (Message("user", f"You are in a room. Your task is to: {self.task_type} around.\\n> "),)

    def step(self, action):
        self.left -= 1
        right = action.content.startswith(self.task_type)
        done = right or self.left == 0
        told = Message("user", f"You see a table {len(action.content) % 3}. Nothing happens.")
        return Observation((told,), done, right if done else None, metrics={"short": float(len(action.content) < 8)})

    def state(self):
        return self.left

def tasks(split, count, *, seed, turns: int = 4):
    start = 1000 * ["train", "dev", "test"].index(split) + seed
    return [Room(number, turns) for number in range(start, start + count)]
'''

# What decides: a reward, a verifier, a gate, a brancher, an estimator.
DECIDE = '''
from turntree.core.labels import Credit, NodeCredit
from turntree.core.protocols import BranchDecision, Brancher, Filter, Gate, GateDecision

def brief(episode, *, most: int = 100):
    """A reward: few characters."""
    return -sum(len(turn.content) for turn in episode.turns) / most

def begins_alike(state, action, *, letters: int = 7):
    """A verifier: the first letters decide."""
    return action.content[:letters] == state.demonstration.content[:letters]

class CutsAlike(Gate):
    """A gate: a group whose rollouts all said the same at first is stopped at `turn`."""

    def __init__(self, *, turn: int = 2):
        self.turn = turn

    def decide(self, group):
        if min(map(len, group.actions)) < self.turn:
            return None
        alike = len({said[0] for said in group.actions})
        return GateDecision(cut=alike == 1, reason="alike", numbers={"distinct": float(alike)}, final=True)

class EveryOther(Brancher):
    """A brancher: forks the rollouts with an even sample once, and remembers how many it was asked about."""

    def __init__(self, *, turn: int = 2):
        self.turn, self.asked = turn, 0

    def decide(self, moment):
        self.asked += 1
        if moment.turn != self.turn or moment.key[0] % 2 or len(moment.key) > 1 or not moment.budget:
            return None
        return BranchDecision(branches=2, reason="even", numbers={"asked": float(self.asked)})

    def expand(self, group):
        return ()

    def state(self):
        return {"asked": self.asked}

    def restore(self, state):
        self.asked = state["asked"]

class Bored(Filter):
    """A filter: a task that gave one reward only `after` times in a row is skipped every other time, and such groups
    are dropped."""

    def __init__(self, seed, *, after: int = 1):
        self.after, self.dull = after, {}

    def skip(self, task_id, iteration):
        return "dull" if self.dull.get(task_id, 0) >= self.after and iteration % 2 == 0 else None

    def drop(self, group):
        return "alike" if len(set(group.rewards)) < 2 else None

    def finished(self, group):
        dull = len(set(group.rewards)) < 2
        self.dull[group.task_id] = self.dull.get(group.task_id, 0) + 1 if dull else 0

    def state(self):
        return {"dull": self.dull}

    def restore(self, state):
        self.dull = dict(state["dull"])

def centred(tree, rewards, *, scale: float = 1.0):
    """An estimator: reward minus the mean of the group, on every turn of its rollout."""
    scored = rewards.scored()
    mean = sum(scored.values()) / max(len(scored), 1)
    nodes, tokens = {}, 0
    for leaf, reward in scored.items():
        better, worse = max(reward - mean, 0.0) * scale, min(reward - mean, 0.0) * scale
        for node in tree.path(leaf):
            if node.sampled:
                held = nodes.get(node.id, NodeCredit(0.0, 0.0, 0.0))
                nodes[node.id] = NodeCredit(held.positive + better, held.negative + worse, held.multiplicity + 1.0)
                tokens += len(node.token_ids)
    return Credit(nodes, float(tokens), float(len(scored)), zero_variance=len(set(scored.values())) < 2)
'''

# What samples, and who is told. The logger can end the process as a power cut would.
AROUND = '''
import json, os, signal

from turntree.engine.hf import HFEngine

class Counting:
    """An engine: that of turntree, as if it were elsewhere (it does not say which `model` it samples from)."""

    built = []

    def __init__(self, policy, *, rows: int = 64):
        self._inner, self.updates, self.rows = HFEngine(policy.model, policy.renderer.stop_ids), [], rows
        self.built.append(self)

    def update_weights(self, model, policy_version):
        self.updates.append(policy_version)
        self._inner.update_weights(model, policy_version)

    def __getattr__(self, name):
        if name in ("model", "_inner"):
            raise AttributeError(name)
        return getattr(self._inner, name)

class Half:
    """No engine: it cannot be cancelled."""

    def __init__(self, policy): ...
    def generate(self, requests): ...

class Lines:
    """A logger: one line a step."""

    def __init__(self, run, *, name: str = "told.jsonl"):
        self.path = run.folder / name

    def log(self, metrics, step):
        with self.path.open("a") as handle:
            handle.write(json.dumps({"step": step, "reward": metrics.get("reward_mean")}) + "\\n")
        if os.environ.get("DIE_AT") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self): ...

def played(row, *, step: str = "step"):
    """A log format: {"side": which, "score": reward, "said": [...]}, and rows that are something else."""
    if "score" not in row:
        return None
    return {"group": row["side"], "iteration": row[step], "reward": row["score"], "actions": row["said"]}

def read(row, *, agent: str = "agent"):
    """A trace format: {"talk": [[who, what], ...]}, and rows that are notes."""
    if "note" in row:
        return None
    roles = {agent: "assistant", "world": "user"}
    messages = [{"role": roles[who], "content": said} for who, said in row["talk"]]
    return {"id": row["name"], "messages": messages, "success": row.get("won")}
'''

# A class with tools, as TRL's `environment_factory` takes it, and a policy that calls them (tiny ones do not).
LIBRARY = '''
class Library:
    """Find out where somebody lives."""

    def reset(self, question, answer, **_):
        self.answer, self.asked = answer, 0
        return question

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: What to look for.
        """
        self.asked += 1
        return f"Ada lives in {self.answer}."

    @property
    def reward(self):
        return 1.0 / (1 + self.asked)

'''
# Who speaks: a renderer written by hand. It writes what the template of the embedded household policy writes.
WORDS = '''
import json, re

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall

CALLS = re.compile(r"((?:<tool_call>\\n.*?\\n</tool_call>)+)", re.DOTALL)

class Marked:
    """A renderer: <|role|>text<|end|>, message by message."""

    def __init__(self, tokenizer, *, end: str = "<|end|>"):
        self._tokenizer, self._end = tokenizer, end
        self.stop_ids = frozenset({tokenizer.convert_tokens_to_ids(end)})

    def prompt(self, messages, tools=()):
        if messages[0].role == "assistant":
            raise InputError("begins with the assistant", field="messages")
        return self._all(messages)

    def completion(self, message):
        if message.role != "assistant":
            raise InputError("is no completion", field="role")
        return self._said(message)

    def extend(self, messages, new, tools=(), *, stopped=True):
        if not messages or messages[-1].role != "assistant":
            raise InputError("does not follow the assistant", field="messages")
        return (*(() if stopped else self.stop_ids), *self._all(new))

    def parse(self, token_ids, tools=()):
        ids = [*token_ids]
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not CALLS.fullmatch(text):
            return Message("assistant", text)
        try:
            calls = [json.loads(one) for one in re.findall(r"<tool_call>\\n(.*?)\\n</tool_call>", text, re.DOTALL)]
            return Message("assistant", "", tuple(ToolCall(call["name"], call["arguments"]) for call in calls))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Message("assistant", text)

    def _all(self, messages):
        ids = []
        for message in messages:
            ids += (*self._ids(f"<|{message.role}|>"), *self._said(message))
        return (*ids, *self._ids("<|assistant|>"))

    def _said(self, message):
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        written = [f"<tool_call>\\n{json.dumps(call, ensure_ascii=False)}\\n</tool_call>" for call in calls]
        return self._ids(message.content + "".join(written) + self._end)

    def _ids(self, text):
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

class Older(Marked):
    def parse(self, token_ids):
        return super().parse(token_ids)
'''

SCRIPT = '''
from turntree.core.messages import Message, ToolCall
from scripted_engine import ScriptedEngine

SAID = (Message("assistant", "", (ToolCall("search", {"query": "Ada"}, "1"),)), Message("assistant", "Oslo"))

def scripted(policy):
    """An engine without a model: calls the tool, or answers."""
    texts = [policy.renderer.completion(message) for message in SAID]
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    return ScriptedEngine(
        lambda prompt, seed: texts[seed % len(texts)], policy.renderer.stop_ids, vocab_size=vocabulary
    )
'''

DEMONSTRATES = '''
from dataclasses import dataclass

from turntree.core.messages import Message
from turntree.traces.schema import Trace

@dataclass(frozen=True)
class Rooms:
    """Somebody who knows the way.

    And who is asked twice."""

    count: int = 4
    """How many rooms."""
    closed: int = 0
    """How many of them nobody gets into."""

    noun = "rooms"
    short = {"--count": "count"}

    def __iter__(self):
        for room in range(self.count):
            said = (Message("user", f"You are at room {room}."), Message("assistant", f"open door {room}"))
            yield "closed" if room < self.closed else Trace(id=f"room-{room}", messages=said, split="train")

@dataclass(frozen=True)
class Nonsense:
    def __iter__(self):
        yield {"no": "trace"}

def plain():
    """No dataclass."""
'''

MODULES = {
    "door_rooms": ROOMS,
    "door_rules": DECIDE,
    "door_machinery": AROUND,
    "door_words": WORDS,
    "my_library": LIBRARY,
    "my_script": SCRIPT,
    "scripted_engine": (Path(__file__).resolve().parents[1] / "scripted_engine.py").read_text(),
    "my_demonstrations": DEMONSTRATES,
}
