"""A custom verifier: `--verifier module:function`.

The function is called as `function(state, action)` with a `TurnState` and an assistant `Message` and returns a reward
in [0, 1], True or False, None when it cannot tell, or a whole `Verdict`. When it raises, the action was not judged: the
verdict has no reward and names the error, so that a crash is counted and never punished. An invalid reward (NaN,
outside [0, 1], another type) is an error in the function and stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from turntree.core import parts, scalars
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import Message, ToolCall, action_kind
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.texts import calls_in, form_of


@dataclass(frozen=True)
class UserVerifier(TurnVerifier):
    """Wraps a user's function. `name` names its code too (`core.parts.Loaded.identity`): an edited rule has a new
    name."""

    name: str
    function: Callable[[TurnState, Message], Any]
    compares: bool = True
    concurrency: int = 1
    together: Callable[[Sequence[tuple[TurnState, Message]], int], Sequence[Any]] | None = None
    """Of an object that judges many actions at once: an answer for each, as `function` would give it."""

    @property
    def batches(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.together is not None

    def judge_all(self, pairs: Sequence[tuple[TurnState, Message]], seed: int = 0) -> list[Verdict]:
        if self.together is None:
            return super().judge_all(pairs, seed)
        kinds = [action_kind(action) for _, action in pairs]
        try:
            answers = list(self.together(pairs, seed)) if pairs else []
            if len(answers) != len(pairs):
                raise ValueError(f"{len(answers)} verdicts for {len(pairs)} actions")
        except BaseException as error:
            return [Verdict(None, f"the verifier raised {reason_of(error)}", kind) for kind in kinds]
        return [self._verdict(answer, kind) for answer, kind in zip(answers, kinds, strict=True)]

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind = action_kind(action)
        try:
            answer = self.function(state, action)
        except BaseException as error:
            return Verdict(None, f"the verifier raised {reason_of(error)}", kind)
        return self._verdict(answer, kind)

    def close(self) -> None:
        close = getattr(getattr(self.function, "__self__", self.function), "close", None)
        if callable(close):
            close()

    def _verdict(self, answer: Any, kind: str) -> Verdict:
        if isinstance(answer, Verdict):
            reward = None if answer.reward is None else self._reward(answer.reward)
            told = {"reason": str(answer.reason), "kind": answer.kind or kind}
            try:
                success = None if answer.success is None else scalars.truth(answer.success)
            except ValueError as error:
                raise InputError(f"returned a success that {error}", field=self.name) from error
            return replace(answer, reward=reward, success=success, parts=scalars.known_numbers(answer.parts), **told)
        if answer is None:
            return Verdict(None, "the verifier could not tell", kind)
        return Verdict(self._reward(answer), self.name.partition("@")[0], kind)

    def _reward(self, answer: Any) -> float:
        hint = "return a number from 0 to 1, True, False, None or a Verdict"
        try:
            reward = scalars.number(answer)
        except ValueError as error:
            raise InputError(f"returned {error}", field=self.name, hint=hint) from error
        if not 0 <= reward <= 1:
            raise InputError(f"returned {reward}", field=self.name, hint=hint)
        return reward


def build_verifier(part: Part, environment: Part | None = None) -> TurnVerifier:
    """The verifier; `environment` is the one that it may play actions in."""
    loaded = parts.load("verifiers", part.name)
    options = [f"+{key}={value}" for key, value in sorted(loaded.resolved(part.options).items())]
    built = loaded.build(part.options, {"environment": environment})
    return wrapped(built, part, "".join([loaded.identity, *options]))


def wrapped(built: Any, part: Part, name: str) -> TurnVerifier:
    """An installed verifier as it is. A function of the user's own is wrapped, and so is the `judge` of an object: an
    exception is counted and gives no reward. Raises `InputError` for what is neither."""
    if part.name in parts.names("verifiers") and isinstance(built, TurnVerifier):
        return built
    function = getattr(built, "judge", built)
    if not callable(function):
        problem = f"{part.name!r} is {type(built).__name__}, not a function"
        raise InputError(problem, field="verifier", hint="a verifier is a function of (state, action)")
    options: dict[str, Any] = {key: getattr(built, key) for key in ("compares", "concurrency") if hasattr(built, key)}
    batches = getattr(built, "batches", hasattr(built, "judge_all"))
    return UserVerifier(name, function, **options, together=built.judge_all if batches else None)


@dataclass(eq=False)
class Chained(TurnVerifier):
    """A verifier whose rules leave something open, about which it may ask another one (`then`). `domain` says how texts
    that act are read."""

    environment: Part | None = None
    _: KW_ONLY
    domain: str
    then: Part | None = None
    """Judges what the rules leave open: `judge`, `executed`, or your own."""

    def chain(self, named: Sequence[str]) -> None:
        """Build `then`. `named` is the rule and the options that are not usual: its name, with that of `then`."""
        self._then = None if self.then is None else build_verifier(self.then, self.environment)
        self.name = "+".join([*named, *([f"then={self._then.name}"] if self._then else [])])
        self.concurrency = 1 if self._then is None else self._then.concurrency

    def reads(self, message: Message, state: TurnState) -> tuple[ToolCall, ...] | None:
        """The calls that it takes a message for; None for words."""
        return calls_in(message, form_of(state, self.domain))

    def close(self) -> None:
        if self._then is not None:
            self._then.close()
