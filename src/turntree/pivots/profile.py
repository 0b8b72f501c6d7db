"""Profile pivot candidates: K local rollouts of a frozen policy at every state (PivotRL, Eq. 4), or fewer where the
first ones already decide how the candidate will be selected (`settle`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.config import Between, Bounded, Positive
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import TurnState, TurnVerifier, Verdict
from turntree.pivots.rows import CandidateProfile, Judgement, Stop, StoredProfile
from turntree.pivots.samples import Sample, Sampler
from turntree.pivots.stopping import AdaptiveConfig, Forecast, Prior, StoppingRule
from turntree.rollout.local import CutTurns, Prompted, judge_demonstrated, judge_turns, rule_name
from turntree.run.artifacts import MOST_ROLLOUTS
from turntree.verify.strict import StrictMatch

_REASONS = 3  # the most distinct reasons for which actions were not judged that are said; the others are only counted


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Bounded):
    """K local rollouts at every candidate (PivotRL, Eq. 4)."""

    rollouts: Annotated[int, Between(2, MOST_ROLLOUTS)] = 16
    """K local rollouts per candidate; with adaptive profiling the maximum."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, max_tokens=256))
    seed: int = 0
    """Of every draw."""
    wave: Positive = 32
    """Candidates that are sampled and logged together. A killed profile repeats its unfinished wave."""
    adaptive: AdaptiveConfig | None = None
    """Stop a candidate early where K rollouts would not change its selection."""
    max_path: Positive = 8192
    """Longest prompt and completion together: `train.max_tokens` of the training to come. Longer states are left out
    and counted, because they could not be trained on."""
    cut_turns: CutTurns = "fail"
    """Reward of a turn that the token limit cut: 0 (fail), or the verifier's verdict on its text (judge)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive is not None:
            self.adaptive.check(self.rollouts)

    @property
    def looks(self) -> list[int]:
        return [self.rollouts] if self.adaptive is None else self.adaptive.looks(self.rollouts)


class Judge:
    """The verifier, and the exact-match rule against which the miss rate is measured. `config.seed` is also that of
    what the verifier draws."""

    def __init__(self, verifier: TurnVerifier, config: ProfileConfig, stored: StoredProfile | None = None) -> None:
        self.verifier, self._config, self._stored = verifier, config, stored
        self._strict = StrictMatch()
        self._reasons: set[str] = set()  # that were said

    @property
    def name(self) -> str:
        return rule_name(self.verifier, self._config.cut_turns)

    def known(self, state: TurnState) -> dict[str, Judgement]:
        """Known verdicts on the actions at a state, by `Sample.key`."""
        return {} if self._stored is None else self._stored.judgements(state, self.name)

    def demonstrated(self, states: Sequence[TurnState]) -> list[Verdict]:
        return judge_demonstrated(self.verifier, states, self._config.seed)

    def __call__(self, pairs: Sequence[tuple[TurnState, Message]]) -> list[Judgement]:
        """The verdicts of both on actions at states, in order; of a verifier that waits for a server many at once. The
        exact rule has none where the verifier does not compare with the demonstration."""
        cut_turns = self._config.cut_turns
        said = judge_turns(self.verifier, pairs, cut_turns=cut_turns, seed=self._config.seed)
        for reason in (one.reason for one in said if one.reward is None):
            if reason not in self._reasons and len(self._reasons) < _REASONS:  # rows hold no reasons
                self._reasons.add(reason)
                notice(f"an action was not judged: {reason}")
        exact: list[float | None] = [None] * len(pairs)
        if self.verifier.compares:
            exact = [one.reward for one in judge_turns(self._strict, pairs, cut_turns=cut_turns)]
        return [Judgement(one.reward, other, one.cost) for one, other in zip(said, exact, strict=True)]


def judge_drafts(drafts: Sequence[Draft], judge: Judge) -> None:
    """Judge every action of the drafts that has no verdict yet, all together."""
    open_ = [(draft, sample) for draft in drafts for sample in draft.unjudged()]
    pairs = [(draft.state, action) for draft, sample in open_ if (action := sample.action) is not None]
    for (draft, sample), judgement in zip(open_, judge(pairs), strict=True):
        draft.enter(sample, judgement)


class Draft:
    """A candidate whose rollouts are being drawn. Equal actions are judged once."""

    def __init__(self, state: TurnState, judge: Judge, demonstrated: Verdict) -> None:
        self.state, self._judge, self._demonstrated = state, judge, demonstrated
        self._samples: list[Sample] = []
        self._known = judge.known(state)
        self._first: tuple[int, Forecast] | None = None  # when it could first have stopped, and as what

    @property
    def rewards(self) -> list[float | None]:
        return [self._judgement(sample).reward for sample in self._samples]

    def add(self, samples: Sequence[Sample]) -> None:
        self._samples += samples

    def unjudged(self) -> list[Sample]:
        """One sample of every distinct action that has no verdict yet."""
        found = {sample.key: sample for sample in self._samples if sample.action is not None}
        return [sample for key, sample in found.items() if key not in self._known]

    def enter(self, sample: Sample, judgement: Judgement) -> None:
        """The verdict on the action of a sample, and on all that are equal to it."""
        self._known[sample.key] = judgement

    def look(self, stopping: StoppingRule) -> bool:
        """Whether the rollouts so far settle the candidate."""
        forecast = stopping.settled(self.rewards)
        if forecast is not None and self._first is None:
            self._first = (len(self._samples), forecast)
        return forecast is not None

    def finish(self, rollouts: int, cost: Cost | None = None) -> CandidateProfile:
        """The profile of the candidate, given at most K = `rollouts` rollouts."""
        count = len(self._samples)
        stop, certainty, audit = Stop.COMPLETE, 1.0, None
        if count < rollouts:
            stop = Stop.OPEN if self._first is None else Stop.SETTLED
            certainty = 0.0 if self._first is None else self._first[1].probability
        elif self._first is not None and self._first[0] < rollouts:
            stop, audit = Stop.AUDITED, {"rollouts": self._first[0], "forecast": self._first[1].kind.value}
        judgements = tuple(self._judgement(sample) for sample in self._samples)
        spent = (*(one.cost for one in (*self._samples, *self._known.values())), self._demonstrated.cost)
        return CandidateProfile(
            state=self.state,
            kind=self._demonstrated.kind,
            gold=self._demonstrated.reward,
            compared=self._judge.verifier.compares,
            samples=tuple(self._samples),
            judgements=judgements,
            stop=stop,
            certainty=certainty,
            audit=audit,
            cost=sum(spent, NO_COST) if cost is None else cost,
        )

    def _judgement(self, sample: Sample) -> Judgement:
        if sample.action is None:
            return Judgement(None, None)
        if sample.key not in self._known:
            judge_drafts([self], self._judge)
        return self._known[sample.key]


def profile_wave(
    prompted: Sequence[Prompted],
    sampler: Sampler,
    judge: Judge,
    config: ProfileConfig,
    prior: Prior | None = None,
    demonstrated: Sequence[Verdict] | None = None,
) -> list[CandidateProfile]:
    """Profile the candidates of one wave. The rollouts of a candidate depend on its id and `config.seed`, not on the
    wave. With `config.adaptive` their number also depends on `prior`, which stays fixed during the wave.
    `demonstrated`: the verdicts on the demonstrated actions, where they are known."""
    known = prior or Prior(config.rollouts)
    stopping = None if config.adaptive is None else StoppingRule(config.adaptive, config.rollouts, known)
    verdicts = demonstrated or judge.demonstrated([item.state for item in prompted])
    drafts = [Draft(item.state, judge, verdict) for item, verdict in zip(prompted, verdicts, strict=True)]
    drawing = list(zip(prompted, drafts, strict=True))
    drawn = 0
    for look in config.looks:
        samples = sampler.draw([(item, range(drawn, look)) for item, _ in drawing], again=look < config.rollouts)
        for (_, draft), more in zip(drawing, samples, strict=True):
            draft.add(more)
        judge_drafts([draft for _, draft in drawing], judge)
        drawn = look
        if stopping is not None and look < config.rollouts:
            drawing = [(i, d) for i, d in drawing if not d.look(stopping) or _audited(d.state, config)]
    return [draft.finish(config.rollouts) for draft in drafts]


def _audited(state: TurnState, config: ProfileConfig) -> bool:
    share = 0.0 if config.adaptive is None else config.adaptive.audit
    return seeds.generator(config.seed, "audit", state.id).random() < share
