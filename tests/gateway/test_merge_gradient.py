"""The expected gradient of sessions with branches, enumerated: which rules of credit point along the true one.

An agent asks for a plan (alone, or with two helpers), for an action that may be invalid and is then asked for once
more, and for an answer. Four parameters, one a kind of call; the reward depends on all that the agent used. Every group
of two sessions is built with its probability, merged and labelled, so that nothing is estimated. The table is in
docs/design/gateway.md (`python tests/gateway/test_merge_gradient.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from turntree.core.completion import Completion
from turntree.credit.comparisons import rloo
from turntree.credit.credit import CreditRule
from turntree.gateway.calls import Call, Session
from turntree.gateway.merge import Merged, merge

PLAN, HELP, ACT, ANSWER = range(4)
CHANCES = (0.4, 0.3, 0.6, 0.5)  # of token 1, by kind of call
NO, YES, ASK = 1, 2, 3  # tokens
Drawn = tuple[tuple[int, int, bool], ...]  # (kind, bit, whether the agent used it), in order
Gradient = list[float]


def sessions_of() -> Iterator[tuple[Drawn, float, float]]:
    """Every session with its probability and its reward."""
    for plan in (0, 1):
        for helped in itertools.product((0, 1), repeat=2 * plan):
            for acts in ((1,), (0, 0), (0, 1)):
                for answer in (0, 1):
                    drawn = [(PLAN, plan, True), *((HELP, bit, True) for bit in helped)]
                    drawn += [(ACT, bit, i == len(acts) - 1) for i, bit in enumerate(acts)]
                    drawn.append((ANSWER, answer, True))
                    chance = math.prod(CHANCES[kind] if bit else 1 - CHANCES[kind] for kind, bit, _ in drawn)
                    valid = acts[-1]
                    yield tuple(drawn), chance, 0.2 * answer + valid * (0.3 + 0.5 * answer) + 0.4 * sum(helped)


def score(kind: int, bit: int) -> Gradient:
    """The gradient of the log-probability of a bit by the four logits."""
    return [float(k == kind) * (bit - CHANCES[kind]) for k in range(4)]


def true_gradient() -> Gradient:
    total = [0.0] * 4
    for drawn, chance, reward in sessions_of():
        for kind, bit, _ in drawn:
            total = [t + chance * reward * g for t, g in zip(total, score(kind, bit), strict=True)]
    return total


def session(drawn: Drawn, reward: float, sample: int) -> Session:
    """The calls as a gateway keeps them. A helper's conversation begins anew; a retry asks the same prompt."""
    calls: list[Call] = []
    main: tuple[int, ...] = (9,)
    for index, (kind, bit, used) in enumerate(drawn):
        prompt = (8, index) if kind == HELP else (*main, ASK + kind)
        token = YES if bit else NO
        completion = Completion(token_ids=(token,), logprobs=(0.0,), entropies=(0.0,), finish="stop")
        calls.append(
            Call(
                call_id=str(index),
                index=index,
                added_ids=prompt,
                added=(),
                completion=completion,
            )
        )
        if kind != HELP and used:
            main = (*prompt, token)
    return Session(session_id=str(sample), task_id="t", calls=tuple(calls), reward=reward, sample=sample)


Weights = Callable[[Merged, list[Session]], dict[tuple[str, str], float]]  # what each call is multiplied with


def every_token_once(found: Merged, made: list[Session]) -> dict[tuple[str, str], float]:
    credit = CreditRule(advantages=rloo)(found.tree, found.rewards).nodes
    return {call: credit[node].positive + credit[node].negative for call, node in found.nodes.items() if node in credit}


def without_what_was_thrown_away(found: Merged, made: list[Session]) -> dict[tuple[str, str], float]:
    """As if an answer whose prompt was asked again had not been sampled."""
    whole = every_token_once(found, made)
    used = {call for one in made for call in _used(one)}
    return {call: weight for call, weight in whole.items() if call in used}


def _used(session: Session) -> Iterator[tuple[str, str]]:
    """The last answer to every prompt."""
    last = {call.prompt_ids: call.call_id for call in session.calls}
    yield from ((session.session_id, call) for call in last.values())


def leaves_share(found: Merged, made: list[Session]) -> dict[tuple[str, str], float]:
    """Every leaf of a session weighs 1 over their number (mean over the trajectories of a session)."""
    whole, tree = every_token_once(found, made), found.tree
    shares: dict[tuple[str, str], float] = {}
    for call, node in found.nodes.items():
        end = found.ends[call[0]]
        leaves = [end, *(leaf for leaf, of in tree.parts().items() if of == end)]
        below = sum(any(n.id == node for n in tree.path(leaf)) for leaf in leaves)
        shares[call] = whole[call] * below / len(leaves)
    return shares


def final_path(found: Merged, made: list[Session]) -> dict[tuple[str, str], float]:
    """Only the path to the last call."""
    whole, tree = every_token_once(found, made), found.tree
    on = {node.id for end in found.ends.values() for node in tree.path(end)}
    return {call: whole[call] for call, node in found.nodes.items() if node in on}


def calls_as_samples(found: Merged, made: list[Session]) -> dict[tuple[str, str], float]:
    """Every call a sample of its own with the reward of its session, compared with all other calls of the group."""
    rows = [(one.session_id, call.call_id, one.reward or 0.0) for one in made for call in one.calls]
    advantages = rloo([reward for _, _, reward in rows])
    return {(name, call): a for (name, call, _), a in zip(rows, advantages, strict=True)}


@dataclass(frozen=True)
class Quality:
    """Length of the mean estimate along the true gradient, length orthogonal to it relative to that, and the trace of
    the covariance relative to the square of the first (as in docs/design/credit.md)."""

    scale: float
    bias: float
    variance: float


def quality(weights: Weights) -> Quality:
    true, mean, square = true_gradient(), [0.0] * 4, 0.0
    for (one, p, reward), (other, q, second) in itertools.product(sessions_of(), repeat=2):
        made = [session(one, reward, 0), session(other, second, 1)]
        found = weights(merge("t", made), made)
        estimate = [0.0] * 4
        for sample, drawn in enumerate((one, other)):
            for index, (kind, bit, _) in enumerate(drawn):
                weight = found.get((str(sample), str(index)), 0.0) / 2
                estimate = [e + weight * g for e, g in zip(estimate, score(kind, bit), strict=True)]
        mean = [m + p * q * e for m, e in zip(mean, estimate, strict=True)]
        square += p * q * sum(e * e for e in estimate)
    norm = math.sqrt(sum(t * t for t in true))
    along = sum(m * t for m, t in zip(mean, true, strict=True)) / norm
    across = math.sqrt(sum((m - along * t / norm) ** 2 for m, t in zip(mean, true, strict=True)))
    return Quality(along / norm, across / along, (square - sum(m * m for m in mean)) / along**2)


def test_every_sampled_token_once_with_the_sessions_advantage_is_the_true_gradient() -> None:
    found = quality(every_token_once)
    assert (found.scale, found.bias) == (pytest.approx(1.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("rule", [without_what_was_thrown_away, leaves_share, final_path, calls_as_samples])
def test_the_other_rules_are_tilted(rule: Weights) -> None:
    assert quality(rule).bias > 0.02


if __name__ == "__main__":
    rules: list[tuple[str, Weights]] = [("session", every_token_once), ("without", without_what_was_thrown_away)]
    rules += [("leaves share", leaves_share), ("final path", final_path), ("calls as samples", calls_as_samples)]
    for name, rule in rules:
        print(name, quality(rule))
