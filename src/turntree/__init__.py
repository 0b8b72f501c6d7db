"""turntree: agentic RL post-training that pays only for turns that teach.

    import turntree as tt

offers what a user's own code needs; each name is loaded when it is first used, so importing costs nothing. Everything
else is in the packages below.

- Messages and environments: `Message`, `ToolCall`, `Observation`, `Environment`, `ToolEnvironment`, `EnvironmentFault`,
  `TaskSet`, `check_environment`.
- Trees: `RolloutTree`, `KeptTree`, `read_trees`, `Verdict`, `Rewards`, `Credit`, `NodeCredit`.
- Rows for a trainer of one's own: `rows`, `Row`.
- Parts that can be brought from outside: `Part`, and the protocols `Gate`, `GateDecision`, `Brancher`,
  `BranchDecision`, `StreamingEngine`, `TurnState`.
- Stages: `load_policy`, `train_pivot`, `train_online`, `evaluate`, `build_report`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Message": "turntree.core.messages",
    "ToolCall": "turntree.core.messages",
    "Observation": "turntree.core.protocols",
    "Environment": "turntree.core.protocols",
    "ToolEnvironment": "turntree.env.tool_environment",
    "EnvironmentFault": "turntree.core.foreign",
    "TaskSet": "turntree.env.tasks",
    "check_environment": "turntree.env.check",
    "RolloutTree": "turntree.core.tree",
    "KeptTree": "turntree.logs.trees",
    "read_trees": "turntree.logs.trees:read",
    "Verdict": "turntree.core.verdict",
    "Rewards": "turntree.core.labels",
    "Credit": "turntree.core.labels",
    "NodeCredit": "turntree.core.labels",
    "rows": "turntree.pack.rows",
    "Row": "turntree.pack.rows",
    "Part": "turntree.core.config",
    "Gate": "turntree.core.protocols",
    "GateDecision": "turntree.core.protocols",
    "Brancher": "turntree.core.protocols",
    "BranchDecision": "turntree.core.protocols",
    "StreamingEngine": "turntree.core.protocols",
    "TurnState": "turntree.core.protocols",
    "load_policy": "turntree.stages.policy",
    "train_pivot": "turntree.stages.train_pivot:run_train_pivot",
    "train_online": "turntree.stages.train_online:run_train_online",
    "evaluate": "turntree.stages.evaluate",
    "build_report": "turntree.report.html",
}
__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from turntree.core.config import Part
    from turntree.core.foreign import EnvironmentFault
    from turntree.core.labels import Credit, NodeCredit, Rewards
    from turntree.core.messages import Message, ToolCall
    from turntree.core.protocols import (
        BranchDecision,
        Brancher,
        Environment,
        Gate,
        GateDecision,
        Observation,
        StreamingEngine,
        TurnState,
    )
    from turntree.core.tree import RolloutTree
    from turntree.core.verdict import Verdict
    from turntree.env.check import check_environment
    from turntree.env.tasks import TaskSet
    from turntree.env.tool_environment import ToolEnvironment
    from turntree.logs.trees import KeptTree
    from turntree.logs.trees import read as read_trees
    from turntree.pack.rows import Row, rows
    from turntree.report.html import build_report
    from turntree.stages.evaluate import evaluate
    from turntree.stages.policy import load_policy
    from turntree.stages.train_online import run_train_online as train_online
    from turntree.stages.train_pivot import run_train_pivot as train_pivot


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'turntree' has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    found = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
