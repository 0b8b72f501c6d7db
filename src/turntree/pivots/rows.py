"""The rows of a profile: the class of a candidate (PivotRL, Eq. 4 and 5), its row, and reading it back.

A finished profile stores samples and verdicts: it can be extended, or rescored without sampling.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from turntree.core.completion import Sampling
from turntree.core.config import Between, to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.outcome import is_zero_variance
from turntree.core.protocols import TurnState
from turntree.pivots.samples import Sample
from turntree.run.artifacts import PROFILE, policy_of
from turntree.run.identity import fingerprint
from turntree.run.means import wilson

PUBLISHED = "published"  # the policy of a profile that was made of published pass rates

Row = Mapping[str, Any]
Threshold = Annotated[float, Between(above=0, most=1.01)]  # lambda_diff: 0.6 is usual, and 1.01 keeps every mean


class Class(StrEnum):
    """The classes partition the candidates."""

    PIVOT = "pivot"  # mixed rewards, mean below lambda
    EASY = "mixed but easy"  # mixed rewards, mean of at least lambda
    SUCCEED = "all succeed"  # the same reward everywhere, of at least lambda
    FAIL = "all fail"  # the same reward everywhere, below lambda
    UNJUDGED = "unjudged"  # fewer than two rewards


def moments(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Mean and population variance (Eq. 4) of judged rewards; None of fewer than two, which cannot differ. Equal
    rewards have a variance of exactly 0, without rounding error."""
    if len(rewards) < 2:
        return None
    mean = math.fsum(rewards) / len(rewards)
    if is_zero_variance(rewards):
        return mean, 0.0
    return mean, math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def rates(rewards: Sequence[float | None]) -> dict[str, Any]:
    """What a row says of the rewards of its rollouts; `low` and `high` are the Wilson interval of the mean."""
    scored = [reward for reward in rewards if reward is not None]
    mean, variance = moments(scored) or (None, None)
    low, high = wilson(sum(scored), len(scored))
    return {
        "rollouts": len(rewards),
        "successes": sum(reward == 1.0 for reward in rewards),
        "unjudged": len(rewards) - len(scored),
        "reward_mean": mean,
        "reward_var": variance,
        "low": low,
        "high": high,
    }


def class_of(rewards: Sequence[float], threshold: float) -> Class:
    """The class of a candidate with these judged rewards at lambda = `threshold` (Eq. 5)."""
    return class_of_moments(moments(rewards), threshold)


def class_of_moments(mean_and_variance: tuple[float, float] | None, threshold: float) -> Class:
    """Eq. 5, the one place."""
    if mean_and_variance is None:
        return Class.UNJUDGED
    mean, variance = mean_and_variance
    if variance == 0:
        return Class.SUCCEED if mean >= min(threshold, 1.0) else Class.FAIL
    return Class.PIVOT if mean < threshold else Class.EASY


def classify(row: Row, threshold: float) -> str:
    """The class of the candidate of a row, as it is written."""
    moments = None if row["reward_mean"] is None else (row["reward_mean"], row["reward_var"])
    return class_of_moments(moments, threshold).value


class Stop(StrEnum):
    """Why sampling stopped at this number of rollouts."""

    COMPLETE = "K reached"
    SETTLED = "settled"
    AUDITED = "audited"  # could have stopped, but was run to K to check the rule
    OPEN = "open"  # rescored, and no longer settled


@dataclass(frozen=True)
class Judgement:
    """What both verifiers said about one action; None where one could not judge."""

    reward: float | None
    strict: float | None
    cost: Cost = NO_COST


@dataclass(frozen=True)
class CandidateProfile:
    """The results of one candidate's rollouts; the sequences are in order of sample number."""

    state: TurnState
    kind: str  # of the demonstrated action
    gold: float | None  # the verdict on the demonstration itself: a value other than 1 is a fault of the verifier
    samples: tuple[Sample, ...]
    judgements: tuple[Judgement, ...]
    stop: Stop
    certainty: float  # predictive probability that all K rollouts would lead to the same selection
    audit: Mapping[str, Any] | None
    cost: Cost
    compared: bool = True  # with the demonstration

    def to_json(self) -> dict[str, Any]:
        """The row of the candidate. `actions` are its distinct actions, frequent ones first; `samples` names the
        action of every rollout in order (null: the engine failed)."""
        state = self.state
        actions, samples = _actions(self.samples, self.judgements)
        return {
            "trace_id": state.trace_id,
            "turn": state.turn,
            "kind": self.kind,
            **rates([judgement.reward for judgement in self.judgements]),
            "stop": self.stop.value,
            "certainty": self.certainty,
            **({} if self.audit is None else {"audit": dict(self.audit)}),
            "faults": dict(Counter(sample.fault for sample in self.samples if sample.action is None)),
            "truncated": sum(sample.truncated for sample in self.samples),
            **({"gold": self.gold} if self.compared else {}),
            "demonstrated": one_line(state.demonstration),
            "state": state_hash(state),
            "reference": reference_hash(state),
            "actions": actions,
            "samples": samples,
            "cost": self.cost.counts(),
        }


# what is read back


class StoredProfile:
    """The rows of a profile by candidate. Only their places in the file are held in memory. Raises `InputError` for a
    profile without samples.

    A row is used for a state whose id, history and tools are those that were profiled. Its samples are then what the
    same policy would draw again with the same sampling and seed (`check_draws`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix in (".gz", ".xz"):
            raise InputError("is packed, and its samples are read at their places", path=path, hint="unpack it")
        self.header, rows = PROFILE.stream(path)
        self._places: dict[tuple[str, int], int] = {}
        for place, row in enumerate(rows, start=1):
            if row.get("samples") is None:
                problem = "holds no samples: its pass rates are published ones"
                raise InputError(problem, path=path, hint="profile with a policy")
            self._places[row["trace_id"], row["turn"]] = place
        self._offsets = array("Q")  # of the header, then of the rows
        offset = 0
        with path.open("rb") as handle:
            for line in handle:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
        self._read = lru_cache(maxsize=256)(self._read_place)

    def check_draws(self, policy: Mapping[str, str], sampling: Sampling, seed: int, engine: str = "hf") -> None:
        """Raise `InputError` unless this policy (fields of `POLICY`) and this engine would draw the stored samples
        again."""
        made = self.header["config"].get("profile") or {}
        found = policy_of(self.header) | {key: made.get(key) for key in ("sampling", "seed")}
        found["engine"] = self.header["config"]["device"]["engine"]["name"]
        wanted: dict[str, Any] = {**policy, "sampling": to_mapping(sampling), "seed": seed, "engine": engine}
        for key, value in wanted.items():
            if found[key] != value:
                hint = "its samples are not those that this run would draw: use the same, or leave --reuse out"
                raise InputError(f"was made with {found[key]!r}, not {value!r}", path=self.path, field=key, hint=hint)

    def row(self, state: TurnState) -> Row | None:
        """The row of a state; None if its history or tools differ."""
        place = self._places.get((state.trace_id, state.turn))
        row = None if place is None else self._read(place)
        return row if row is not None and row.get("state") == state_hash(state) else None

    def samples(self, state: TurnState) -> Sequence[Sample]:
        """The samples of a state in order; none where it was not profiled."""
        row = self.row(state)
        return () if row is None else samples_of(row)

    def judgements(self, state: TurnState, verifier: str) -> dict[str, Judgement]:
        """The stored verdicts of `verifier` (and of the strict rule) at a state; empty where another verifier judged,
        or the demonstration differs."""
        row = self.row(state)
        if row is None or self.header["verifier"] != verifier or row["reference"] != reference_hash(state):
            return {}
        return judgements_of(row)

    def _read_place(self, place: int) -> Mapping[str, Any]:
        with self.path.open("rb") as handle:
            handle.seek(self._offsets[place])
            return PROFILE.parse(handle.readline(), self.path, place + 1)


def samples_of(row: Row) -> list[Sample]:
    """The samples in a row, by number; their cost is that of the row."""
    actions = [Sample(_message(action)) for action in row["actions"]]
    faults = iter([reason for reason, count in row["faults"].items() for _ in range(count)])
    return [Sample(None, fault=next(faults)) if index is None else actions[index] for index in row["samples"]]


def judgements_of(row: Row) -> dict[str, Judgement]:
    """The verdicts on the uncut actions of a row, by `Sample.key`. Cut actions are judged again, because older profiles
    hold the verdict on their text, and so are those without a verdict: a judge may have been down."""
    whole = [one for one in row["actions"] if not one.get("truncated", False) and one["reward"] is not None]
    return {Sample(_message(action)).key: Judgement(action["reward"], action["strict"]) for action in whole}


def state_hash(state: TurnState) -> str:
    """A key of what the policy sees at the state: equal for equal history and tools."""
    return fingerprint([[message.to_chat() for message in state.history], list(state.tools)])


def reference_hash(state: TurnState) -> str:
    """A key of what a verifier compares with: the demonstration, and how the environment is rebuilt."""
    return fingerprint([state.demonstration.to_chat(), state.environment])


def one_line(message: Message) -> str:
    """An action as one readable line, which also serves as the key for counting equal actions: call ids (drawn at
    random) and the order of arguments do not matter."""
    calls = " ".join(f"{call.name}({json.dumps(call.arguments, sort_keys=True)})" for call in message.tool_calls)
    return " ".join(part for part in (message.content.strip(), calls) if part)


def message_text(message: Message) -> str:
    """Text and tool calls of a message."""
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return " ".join(part for part in (message.content, calls) if part)


def _actions(
    samples: Sequence[Sample], judgements: Sequence[Judgement]
) -> tuple[list[dict[str, Any]], list[int | None]]:
    counted: dict[str, dict[str, Any]] = {}
    for sample, judgement in zip(samples, judgements, strict=True):
        if sample.action is None:
            continue
        entry = counted.setdefault(sample.key, _entry(sample.action))
        entry |= {"reward": judgement.reward, "strict": judgement.strict, "count": entry["count"] + 1}
    order = sorted(counted, key=lambda key: (-counted[key]["count"], counted[key]["text"], key))
    places = {key: place for place, key in enumerate(order)}
    named = [None if sample.action is None else places[sample.key] for sample in samples]
    return [counted[key] for key in order], named


def _entry(action: Message) -> dict[str, Any]:
    """The row entry of an action. The text is enough unless there are calls or a thought; then the whole message is
    kept too."""
    entry: dict[str, Any] = {"text": message_text(action), "reward": None, "strict": None, "count": 0}
    if action.tool_calls or action.reasoning:
        entry["message"] = action.to_chat()
    return entry | ({"truncated": True} if action.cut else {})


def _message(action: Row) -> Message:
    said = Message.from_chat(action["message"]) if "message" in action else Message("assistant", action["text"])
    return replace(said, cut=action.get("truncated", False))
