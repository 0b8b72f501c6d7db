"""End-to-end GRPO: sample whole episodes with the current policy, update on them, repeat.

`train.loop.RolloutAlgorithm.step` says in which order, `rollout.service` plays and judges the episodes. All groups of
an iteration are sampled with the weights of the previous update, or (`max_off_policy_steps` K, with `Parts.spread`) of
K updates before: the workers then play the next K iterations during the updates. The trainer computes the old
log-probabilities of such groups, and the loss weighs their tokens by the truncated ratio of these to the sampled ones
(`importance_cap`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.credit.checked import credit_of, over_batch
from turntree.decide.filters.dapo import DapoFilter
from turntree.rollout.accounting import TreeAccount, account
from turntree.rollout.episode_figures import branch_figures, group_figures, staleness
from turntree.rollout.service import EpisodeGroup, Parts, RolloutService
from turntree.train.config import OnlineConfig
from turntree.train.loop import RolloutAlgorithm, Row, Trainee


class OnlineGRPO(RolloutAlgorithm[EpisodeGroup]):
    """GRPO on whole episodes; a step is an iteration. A checkpoint holds the groups that were played ahead."""

    def __init__(self, parts: Parts[Trainee], config: OnlineConfig) -> None:
        super().__init__(parts.policy, config, config.iterations)
        self.config, self.parts, self.check_every = config, parts, config.check_every
        self.service = RolloutService(parts, config.played, parts.estimator or config.estimator)
        self.account = TreeAccount()
        # of the iteration
        self._sampled_for = 0  # the version of the policy before the update
        self._waited = 0.0  # seconds for the groups

    def state(self) -> Row:
        return {**super().state(), **self.service.state(), "account": dataclasses.asdict(self.account)}

    def restore(self, state: Row) -> None:
        super().restore(state)
        self.service.restore(state)
        self.account = TreeAccount(**state["account"])

    # sample

    def sample(self, step: int) -> Sequence[EpisodeGroup]:
        started = time.perf_counter()
        groups = list(self.service.groups(step))
        self.cost = sum((group.tree.cost for group in groups), self.cost)
        self._waited = time.perf_counter() - started
        self._sampled_for = self.service.version
        return groups

    # credit

    def credit(self, step: int, groups: Sequence[EpisodeGroup]) -> Sequence[Credit | None]:
        """What filters left of the credit that `rollout.service` gave each group; by a rule that compares over the
        whole batch, that of the batch."""
        if not self.cost.trained_tokens:
            self._check_turn_rewards(groups)
        kept = [group for group in groups if group.credit is not None and not group.dropped]
        rule = over_batch(self.service.estimator, [group.grown.rewards for group in kept])
        if rule is not self.service.estimator:
            for group in kept:
                group.credit = credit_of(rule, group.tree, group.grown.rewards)
        return [group.trained_credit for group in groups]

    def _check_turn_rewards(self, groups: Sequence[EpisodeGroup]) -> None:
        said = {name for group in groups for node in group.tree for name in node.metrics}
        for name in self.config.turn_rewards:
            if name not in said and any(group.credit for group in groups):
                hint = f"it says {', '.join(sorted(said)) or 'nothing but its messages'}"
                field = f"train.turn_rewards.{name}"
                raise ConfigError("is nothing that the environment said so far", field=field, hint=hint)

    # figures

    def observe(self, step: int, groups: Sequence[EpisodeGroup], credits: Sequence[Credit | None]) -> Row:
        grown = [group.grown for group in groups]
        made = sum((account(group.tree) for group in groups), TreeAccount())
        self.account += made
        unmoved = self.config.loss.normalizer == "constant" or any(
            isinstance(f, DapoFilter) for f in self.parts.filters
        )
        precision = self.service.monitor.precision()
        return {
            **group_figures(grown, amplifies=not unmoved),
            **({"gate_precision": precision} if precision else {}),
            **({} if self.parts.brancher is None else {"branching": branch_figures(grown, made)}),
            **self._staleness(groups),
            "groups_dropped": dict(Counter(group.dropped[1] for group in groups if group.dropped)),
            "prompts_skipped": dict(Counter(why for _, why in self.service.skipped)),
            "spent": self.cost.counts(),
            "trees": dataclasses.asdict(self.account),
            "timing": {
                "seconds": self.cost.seconds,
                "busy_share": self.service.player.usage.busy_share,
                "gate_seconds": self.service.player.usage.gate_seconds,
                "wait_seconds": self._waited,
                **self.parts.timing(),
            },
        }

    def _staleness(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Updates between the weights that sampled a tree and those that were trained on it; nothing where rollouts
        are synchronous."""
        if not self.config.max_off_policy_steps:
            return {}
        kept = [group.tree for group in groups if group.trained_credit is not None]
        ages = [age for tree in kept if (age := staleness(tree, self._sampled_for)) is not None]
        return {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)} if ages else {}
