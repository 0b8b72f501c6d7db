"""`turntree retention`: change of a policy outside its training domain, measured with EleutherAI's lm-eval.

Both policies answer the same questions, so changes are paired question by question.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.core.errors import InputError, TurntreeError
from turntree.run.files import write_json
from turntree.run.means import Z95
from turntree.stages.config import ForgettingConfig
from turntree.stages.policy import load_policy

SCHEMA = "turntree.retention/1"


def run_forgetting(config: ForgettingConfig, out: Path | None = None) -> dict[str, Any]:
    """Evaluate the base and the policy; a row for each task and metric. Raises `InputError` in one line where lm-eval
    is not installed, does not know a task or cannot get its data."""
    manager = _tasks(config)
    base_hash, base = _measure(config.base, config, manager)
    policy_hash, policy = _measure(config.model, config, manager)
    result = {
        "schema": SCHEMA,
        "config": to_mapping(config),
        "base_hash": base_hash,
        "policy_hash": policy_hash,
        "lm_eval": base["lm_eval_version"],
        "tasks": compare(base, policy),
    }
    if out is not None:
        write_json(out, result)
    return result


def compare(base: Mapping[str, Any], policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each task (or group of tasks) and metric of two results of `lm_eval.simple_evaluate`. Where both
    hold a number for every question, the change has a 95% interval (normal, paired); elsewhere it has none."""
    rows: list[dict[str, Any]] = []
    for task, figures in base["results"].items():
        for key, value in figures.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, int | float) or not kind or metric.endswith("_stderr"):
                continue
            other = policy["results"][task][key]
            changes = _changes(base, policy, task, metric, kind)
            low, high = _interval(changes)
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": kind,
                    "base": value,
                    "policy": other,
                    "change": other - value,
                    "low": low,
                    "high": high,
                    "questions": len(changes),
                    "higher_is_better": base.get("higher_is_better", {}).get(task, {}).get(metric),
                }
            )
    return rows


def _changes(base: Mapping[str, Any], policy: Mapping[str, Any], task: str, metric: str, kind: str) -> list[float]:
    """By question; empty for groups, and for metrics that are not a mean over questions."""
    before, after = (_by_question(result, task, metric, kind) for result in (base, policy))
    if not before or before.keys() != after.keys():
        return []
    if not math.isclose(statistics.fmean(before.values()), base["results"][task][f"{metric},{kind}"], abs_tol=1e-9):
        return []
    return [after[question] - value for question, value in before.items()]


def _by_question(result: Mapping[str, Any], task: str, metric: str, kind: str) -> dict[int, float]:
    samples = (sample for sample in result["samples"].get(task, ()) if sample["filter"] == kind)
    values = {sample["doc_id"]: sample.get(metric) for sample in samples}
    if not all(isinstance(value, int | float) for value in values.values()):
        return {}
    return {question: float(value) for question, value in values.items()}


def _interval(changes: Sequence[float]) -> tuple[float | None, float | None]:
    if len(changes) < 2:
        return None, None
    mean, half = statistics.fmean(changes), Z95 * statistics.stdev(changes) / math.sqrt(len(changes))
    return mean - half, mean + half


def _tasks(config: ForgettingConfig) -> Any:
    """lm-eval's index of tasks, with every wanted task loaded once: its data are here, or this is the error."""
    try:
        import lm_eval.models.huggingface  # noqa: F401 - the backend is an extra of lm-eval's own  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        problem = f"retention needs lm-eval and its backend ({error})"
        raise InputError(problem, hint="pip install 'turntree[lm-eval]'") from error
    if config.include is not None and not Path(config.include).is_dir():
        raise InputError("is not a folder", path=config.include, hint="name the folder of the tasks' YAML files")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=config.include, include_defaults=False)
    if not set(config.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=config.include)  # some ten thousand files
    unknown = [task for task in config.tasks if task not in manager.all_tasks]
    if unknown:
        raise InputError(f"lm-eval knows no task {unknown[0]!r}", field="tasks", hint="see 'lm-eval ls tasks'")
    try:
        manager.load(list(config.tasks))
    except Exception as error:  # the boundary to data sets and their scripts
        problem = f"a task cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise InputError(problem, field="tasks", hint="its data must be on this machine or within reach") from error
    return manager


def _measure(source: str, config: ForgettingConfig, manager: Any) -> tuple[str, Any]:
    """The hash of a policy and what `lm_eval.simple_evaluate` says about it."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    backend: Any = HFLM
    evaluate: Any = lm_eval.simple_evaluate  # decorators hide both signatures
    policy = load_policy(source, config.device)
    wrapped = backend(
        pretrained=policy.model, tokenizer=policy.tokenizer, device=config.device.name, batch_size=config.batch
    )
    found = evaluate(
        wrapped,
        tasks=list(config.tasks),
        task_manager=manager,
        limit=config.limit or None,
        apply_chat_template=config.chat,
        bootstrap_iters=0,
        random_seed=config.seed,
        numpy_random_seed=config.seed,
        torch_random_seed=config.seed,
        fewshot_random_seed=config.seed,
    )
    if found is None:
        raise TurntreeError("lm-eval returned nothing: this is not the first process of its group")
    return policy.hash, found
