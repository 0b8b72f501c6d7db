"""verl's rollout dumps: `trainer.rollout_data_dir` holds one `STEP.jsonl` a step, one line a rollout.

Fields (`RayPPOTrainer._dump_generations`): `input` and `output` are decoded text without special tokens, `score` is the
sum of token-level scores, `gts` the ground truth, `step`; then whatever the reward function returns beside the score,
`request_id` where the agent loop sets one, and in trainer v1 `uid` = "{prompt}_{rollout}_{output}". There are no token
counts; `output` of a multi-turn rollout holds the tools' answers too.
"""

from __future__ import annotations

from typing import Any

from turntree.logs.groups import LoggedRollout
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, count, named_prompt, reward, text


def read_row(row: dict[str, Any], config: ReadConfig, file_number: int) -> LoggedRow:
    """Rollouts of one step with the same `uid` prefix, or else the same prompt, are one group; a prompt is a task."""
    prompt, output = row.get("input"), row.get("output")
    if not isinstance(prompt, str) or not isinstance(output, str):
        raise RowRefused("no text in field 'input' or 'output'")
    actions, observations = config.split(output)
    uid = text(row, "uid") or ""
    named = uid.count("_") >= 2
    if not prompt.strip() and not named:
        raise RowRefused("neither a prompt nor a uid: its group is not known")
    task = named_prompt(prompt)
    return LoggedRow(
        group=uid.rsplit("_", 2)[0] if named else task,
        task=task,
        rollout=LoggedRollout(
            actions=actions,
            reward=reward(row, config.rewards or ("score",)),
            observations=observations,
            characters=sum(map(len, actions)) if actions else len(output),
        ),
        iteration=count(row, "step"),
        task_type=text(row, "data_source"),
    )
