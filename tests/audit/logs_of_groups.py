"""Logged groups for tests, from as few words as possible."""

from turntree.logs.groups import LoggedGroup, LoggedRollout


def group(task, rewards, iteration=0, actions=None, tokens=10, task_type=None):
    """`actions`: one sequence for all rollouts, or one each; every turn has `tokens` tokens."""
    each = actions if actions and not isinstance(actions[0], str) else [actions or ("a", "b")] * len(rewards)
    rollouts = tuple(
        LoggedRollout(actions=tuple(acts), reward=reward, turn_tokens=(tokens,) * len(acts))
        for acts, reward in zip(each, rewards, strict=True)
    )
    return LoggedGroup(id=f"{iteration}/{task}", task=task, rollouts=rollouts, iteration=iteration, task_type=task_type)


FAIL, SUCCEED, MIXED, CENSORED = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (None, 1.0)
