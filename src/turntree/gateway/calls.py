"""What an agent's session is made of: model calls, in token ids, and how each follows from an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.core.completion import Completion
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message
from turntree.core.tree import StopReason

Cause = Literal[
    "start", "continue", "rewritten", "retry", "candidate", "compaction", "dropped_reasoning", "edited", "tools"
]
"""Why a call's prompt begins where it does.

- `start`: it continues no earlier call (a first call, a sub-agent, a conversation about something else).
- `continue`: an earlier call's prompt, its answer, and new messages. Nothing was tokenised again.
- `rewritten`: the same, where the model's template drops thoughts before the new messages (`renderer.thoughts`).
- `retry`: the very prompt of an earlier call, asked again.
- `candidate`: one more answer to a request with n > 1.
- `compaction`: earlier messages were removed or replaced by fewer ones; the call still shares a beginning with another.
- `dropped_reasoning`: an earlier answer came back without its reasoning.
- `edited`: an earlier message came back with another text.
- `tools`: the same messages under other tools.

From `compaction` on, and where it is `rewritten`, the prompt was rendered anew. All but `start` and `continue` are
forks in the tree, with this cause.
"""

Status = Literal["kept", "failed", "disconnected"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One model call of a session: one prompt and what was sampled for it. A request for n candidates is n calls.

    The engine saw `prompt_ids` and sampled `completion`; nothing in here was ever tokenised twice.
    """

    call_id: str
    session_id: str
    task_id: str
    index: int  # order of the calls of a session, from 0, by the time at which they were asked
    prompt_ids: tuple[int, ...]
    completion: Completion | None  # None unless the call was kept
    messages: tuple[Message, ...]  # the prompt, as the agent sent it
    tools: tuple[dict[str, Any], ...] = ()
    answer: Message | None = None  # what `completion` says
    follows: str | None = None  # the earlier call whose prompt and completion begin as this prompt does
    cause: Cause = "start"
    status: Status = "kept"
    error: str = ""  # why it failed
    cost: Cost = NO_COST  # of a call without a completion: what the engine had done by then
    request_id: str = ""  # the candidates of one request share it
    meta: dict[str, Any] = field(default_factory=dict[str, Any])  # what the agent said about the call (`metadata`)

    @property
    def sequence(self) -> tuple[int, ...]:
        """All that the engine saw and sampled."""
        return self.prompt_ids if self.completion is None else self.prompt_ids + self.completion.token_ids


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rollout of an agent. `reward` is None where there is none: it is then censored for `reason`, never 0.

    Where the one who rewards knows what became of single calls, `call_rewards` says so by call id (a losing candidate,
    a failed sub-agent)."""

    session_id: str
    task_id: str
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    success: bool | None = None
    reason: str = ""
    call_rewards: dict[str, float] = field(default_factory=dict[str, float])
    stop: StopReason = StopReason.COMPLETED  # or the limit that the agent ran into last and did not get over
    sample: int = 0  # its place in the group of its task
