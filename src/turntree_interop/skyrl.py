"""SkyRL: a parquet file for its `PromptDataset`, and an environment of one turn that our verifier judges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turntree.render.tool_calls import ToolFormat
from turntree.rollout.local import CutTurns
from turntree.stages.export import Bundle
from turntree_interop.judging import Judge, pack_state, required, write_reward
from turntree_interop.rows import columns, write_parquet

ENVIRONMENT = "turntree_pivot"


def pivot_environment(
    verifier: str = "recommended",
    *,
    options: Mapping[str, Any] | None = None,
    tool_format: ToolFormat = "hermes",
    cut_turns: CutTurns = "fail",
) -> type:
    """The class of the environment, registered as `turntree_pivot` in `skyrl_gym`: one action, judged at the state of
    the row. SkyRL knows no missing reward: an action that is not judged stops the run, unless the environment's
    configuration says what stands in for it (`environment.skyrl_gym.turntree_pivot.unjudged`)."""
    import skyrl_gym  # pyright: ignore[reportMissingImports]
    from skyrl_gym.envs.base_text_env import (  # pyright: ignore[reportMissingImports]
        BaseTextEnv,
        BaseTextEnvStepOutput,
    )

    judge = Judge(verifier, options=options, tool_format=tool_format, cut_turns=cut_turns)

    class PivotEnvironment(BaseTextEnv):
        """One action at a pivot."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self._state = str((extras or {})["reward_spec"]["state"])
            self._unjudged = getattr(env_config, "get", lambda _: None)("unjudged")

        def step(self, action: str) -> Any:
            verdict = judge([(self._state, judge.action(action))])[0]
            told = {"judged": float(verdict.reward is not None), "reason": verdict.reason}
            reward = required(verdict, self._unjudged)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=told)

    skyrl_gym.register(id=ENVIRONMENT, entry_point=PivotEnvironment)
    return PivotEnvironment


def export_skyrl(bundle: Bundle, out: Path) -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, which registers the environment. SkyRL passes no tools to the chat
    template, so the tools of a pivot stand in its system message."""
    rows = [
        {
            "data_source": "turntree",
            "prompt": pivot.prompt,
            "env_class": ENVIRONMENT,
            "reward_spec": {"method": "rule", "state": pack_state(pivot.state)},
            "extra_info": columns(pivot),
        }
        for pivot in bundle.pivots
    ]
    write_parquet(out / "pivots.parquet", rows, ("prompt", "reward_spec", "extra_info"))
    names = ("turntree_interop.skyrl", "pivot_environment", "PivotEnvironment")
    says = "Registers the environment of these pivots in skyrl_gym: import it before training starts."
    write_reward(out, says, names, bundle.reward_settings())
    return {"files": ["pivots.parquet", "reward.py"]}
