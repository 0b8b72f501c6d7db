"""Every framework's log says the same of the same rollouts, splits what contradicts itself, and censors what failed.

The rows are those that each framework's own writer makes (verifiers 0.4.0, SkyRL 0.4.0, AReaL 1.0.4, Agent Lightning
1.0.2, and the sources of prime-rl, slime and rLLM of August 2026).
"""

import json
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.audit.audit import run_audit
from turntree.audit.config import AuditConfig
from turntree.core.errors import InputError
from turntree.logs.read import open_log

REWARDS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=4), min_size=1, max_size=4)
STEPS = st.lists(REWARDS, min_size=1, max_size=3)


def message(text):
    return {"role": "assistant", "content": text}


def graph(task, reward, said="b", **more):
    nodes = [
        {
            "message": {"role": "user", "content": f"Q{task}"},
            "sampled": False,
            "token_ids": [1, 2],
            "mask": [False] * 2,
        },
        {
            "parent": 0,
            "message": message(said) | {"tool_calls": [{"id": "c", "name": "f", "arguments": '{"a": 1}'}]},
            "sampled": True,
            "token_ids": [3, 4, 5],
            "mask": [False, True, True],
        },
        {"parent": 1, "message": {"role": "tool", "content": "seen", "tool_call_id": "c"}, "sampled": False},
        {"parent": 2, "message": message(said), "sampled": True, "token_ids": [6], "mask": [True]},
    ]
    return {
        "id": "x",
        "version": 1,
        "task": {"type": "Task", "data": {"prompt": f"Q{task}", "answer": task}, "key": f"k{task}"},
        "agent": {"name": "solver", "trainable": True},
        "nodes": nodes,
        "rewards": {"correct": {"score": reward, "weight": 1.0}, "format": {"score": 0.5, "weight": 0.0}},
        "ok": True,
        "is_timeout": False,
        "errors": [],
        "info": {"prime_rl": {"env_name": "sums"}},
    } | more


def flat(task, step, reward):
    asked = [{"role": "user", "content": f"Q{task}"}]
    row = {"example_id": task, "task": "sums", "prompt": asked, "completion": [message("b")], "reward": reward}
    return row | {"advantage": 0.0, "is_truncated": False, "error": None}


EPISODE = {"id": "e", "env": {"id": "sums"}, "task": {"data": {}}}


def by_step(folder, name):
    return lambda root, step: root / folder.format(step) / name


def sample(task, number, reward):
    return {"group_index": task, "index": number, "prompt": f"Q{task}", "response": "b", "response_length": 3,
            "label": str(task), "reward": reward, "status": "completed", "metadata": {}}  # fmt: skip


WRITERS = {
    # where the file of a step lies, and a line
    "prime-rl": (by_step("rollouts/step_{}", "train_rollouts.jsonl"), lambda s, t, n, r: graph(t, r)),
    "prime-rl flat": (by_step("step_{}", "train_rollouts.jsonl"), lambda s, t, n, r: flat(t, s, r)),
    "prime-rl episodes": (
        by_step("step_{}", "traces.jsonl"),
        lambda s, t, n, r: {"id": "e", "env": {"id": "sums"}, "task": {"data": {}}, "group": {"id": f"g{s}-{t}"},
                            "traces": [graph(t, r), graph(t, 1 - r, agent={"name": "judge", "trainable": False})]},
    ),
    "skyrl": (
        by_step("global_step_{}_evals", "gsm8k.jsonl"),
        lambda s, t, n, r: {"input_prompt": f"Q{t}", "output_response": "b", "score": [0.0, r], "stop_reason": "stop",
                            "env_class": "gsm8k", "env_extras": {"extra_info": {"index": t}}, "data_source": "gsm8k"},
    ),
    "slime": (by_step("", "{}.jsonl"), lambda s, t, n, r: sample(t, n, r)),
    "areal": (
        by_step("{}", "tasks.jsonl"),
        lambda s, t, n, r: {"task_id": 100 * s + t, "sample_idx": n, "seqlen": 9, "prompt_len": 4, "head_version": s,
                            "tail_version": s, "reward": r, "prompt": f"Q{t}", "completion": "b"},
    ),
    "agent-lightning": (
        by_step("step_{}", "train_trajectories.jsonl"),
        lambda s, t, n, r: {"rollout_id": f"ro-{t}-{n}", "reward": r, "prompt": f"Q{t}", "response": "b"},
    ),
}  # fmt: skip
FRESH = count()


def written(root, writer, steps):
    """The folder of a log with these rewards, by step, task and rollout. Rollouts are logged in another order."""
    place, line = writer
    for step, groups in enumerate(steps):
        path = place(root, step)
        path = path.with_name(path.name.format(step))
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [line(step, task, n, r) for task, rewards in enumerate(groups) for n, r in enumerate(rewards)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[::2] + rows[1::2]))
    return root


def episodes(root, steps):
    for step, groups in enumerate(steps):
        folder = root / f"train_step_{step}_epoch_0"
        folder.mkdir(parents=True)
        for task, rewards in enumerate(groups):
            for n, reward in enumerate(rewards):
                turn = {"observation": f"Q{task}", "action": "b", "reward": 0.0, "done": True, "model_response": "b"}
                row = {"training_step": step, "epoch": 0, "episode_id": f"{task}:{n}", "task": {"question": f"Q{task}"},
                       "task_hash": f"h{task}", "is_correct": reward > 0, "termination_reason": "env_done",
                       "trajectories": [{"name": "a", "uid": "u", "reward": reward, "steps": [turn]}]}  # fmt: skip
                (folder / f"episode_hashh{task}_id{task}_{n}.json").write_text(json.dumps(row, indent=2))
    return root


def groups_of(root):
    log = open_log([root])
    found = sorted(((g.iteration, g.task, sorted(g.rewards)) for g in log), key=str)
    assert not log.report.dropped
    return found, log.report.format


@pytest.mark.parametrize("name", [*WRITERS, "rllm"])
@settings(max_examples=8, deadline=None)
@given(steps=STEPS)
def test_a_log_is_recognised_and_holds_the_groups_that_were_played(name, steps, tmp_path_factory):
    root = tmp_path_factory.mktemp(f"log{next(FRESH)}")
    found, format = groups_of(episodes(root, steps) if name == "rllm" else written(root, WRITERS[name], steps))
    assert format == name.split()[0]
    wanted = sorted((step, sorted(rewards)) for step, groups in enumerate(steps) for rewards in groups)
    assert sorted((step, rewards) for step, _, rewards in found) == wanted
    assert len({task for _, task, _ in found}) == max(map(len, steps))


def test_turns_and_their_tokens_are_those_that_the_policy_sampled(tmp_path):
    written(tmp_path, WRITERS["prime-rl"], [[[0.0, 1.0]]])
    (group,) = open_log([tmp_path])
    assert {rollout.actions for rollout in group.rollouts} == {('f({"a": 1})', "b")}
    assert {rollout.turn_tokens for rollout in group.rollouts} == {(2, 1)}
    assert {rollout.observations for rollout in group.rollouts} == {("Q0", "seen")}


@pytest.mark.parametrize(
    "rows",
    [
        [graph(0, 0.0, errors=[{"type": "ProviderError", "message": "503"}], ok=False), graph(0, 1.0), graph(0, 0.0)],
        [{**flat(0, 0, 0.0), "error": "ConnectionError('refused')"}, flat(0, 0, 1.0), flat(0, 0, 0.0)],
        [sample(0, 0, 0.0) | {"status": "aborted"}, sample(0, 1, 1.0), sample(0, 2, 0.0)],
    ],
)
def test_a_rollout_that_failed_has_no_reward(rows, tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = open_log([tmp_path / "log.jsonl"])
    assert sorted(map(str, group.rewards)) == ["0.0", "1.0", "None"]


@pytest.mark.parametrize(
    "row, stop",
    [
        (graph(0, 1.0, ok=False), "an error"),
        (graph(0, 1.0, rewards={"tests": {"score": 1.0}, "judge": None}), "not scored"),
        (graph(0, 1.0, rewards={"tests": {"score": 1.0}, "judge": {"score": float("nan")}}), "not scored"),
        (EPISODE | {"ok": False, "errors": [{"type": "EnvError"}], "traces": [graph(0, 1.0)]}, "EnvError"),
        (EPISODE | {"ok": False, "errors": [], "traces": [graph(0, 1.0)]}, "an error"),
        (EPISODE | {"ok": False, "traces": [graph(0, 1.0, ok=False, errors=[{"type": "TaskError"}])]}, "TaskError"),
    ],
)
def test_a_rollout_whose_episode_failed_or_that_was_not_wholly_scored_says_why_it_has_no_reward(row, stop, tmp_path):
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, graph(0, 0.0))))
    rollouts = {(rollout.reward, rollout.stop) for group in open_log([tmp_path]) for rollout in group.rollouts}
    assert rollouts == {(None, stop), (0.0, None)}


def test_errors_of_attempts_before_one_that_succeeded_cost_no_reward(tmp_path):
    row = EPISODE | {"ok": True, "errors": [{"type": "EnvError"}], "traces": [graph(0, 1.0)]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(row) + "\n")
    assert [group.rewards for group in open_log([tmp_path])] == [(1.0,)]


@pytest.mark.parametrize("rewards", [{"tests": 0.5}, [1.0], {"tests": {"score": 1.0}, "judge": "good"}])
def test_rewards_in_another_form_are_dropped_and_counted(rewards, tmp_path):
    rows = [graph(0, 0.0), graph(0, 1.0, rewards=rewards)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = open_log([tmp_path])
    assert [group.rewards for group in log] == [(0.0,)]
    assert log.report.dropped == {"field 'rewards' is not {name: {score, weight}}": 1}


@pytest.mark.parametrize("field", [{"label": "9"}, {"prompt": "another"}])
def test_samples_of_one_group_index_that_contradict_each_other_are_two_groups(field, tmp_path):
    rows = [sample(0, n, 0.0) for n in range(2)] + [sample(0, n, 1.0) | field for n in (2, 3)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_audit([tmp_path / "0.jsonl"], AuditConfig())
    if "label" in field:
        assert (found["zero_variance"], found["scored"]) == (2, 2)
    else:
        assert found["counts"]["groups"] == 2 and found["zero_variance_rate"] == 1.0


def test_a_pickle_is_not_opened(tmp_path):
    (tmp_path / "3.pt").write_bytes(b"PK")
    with pytest.raises(InputError) as refused:
        list(open_log([tmp_path / "3.pt"]))
    assert refused.value.path == tmp_path / "3.pt"


@pytest.mark.parametrize("form", ["verl", "slime"])
@given(outputs=st.lists(st.integers(1, 3), min_size=2, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_a_rollout_whose_context_was_compacted_is_one_rollout_of_several_outputs(form, outputs, seed, tmp_path_factory):
    rows = []
    for rollout, many in enumerate(outputs):
        for n in range(many):
            asked, reward = "Q" if n == 0 else f"Q, summary {rollout}.{n}", float(rollout)
            if form == "verl":
                own = {"uid": f"abc_{rollout}_{n}", "input": asked, "score": reward}
                rows.append(own | {"output": "ab", "gts": "4", "step": 1})
            else:
                own = {"rollout_id": rollout, "index": len(rows), "reward": reward}
                rows.append(sample(0, n, reward) | own | {"response_length": 2})
    random.Random(seed).shuffle(rows)
    file = tmp_path_factory.mktemp("log") / "1.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = open_log([file])
    (group,) = log
    assert sorted(group.rewards) == [float(n) for n in range(len(outputs))] and log.report.rollouts == len(outputs)
    made = {rollout.reward: rollout for rollout in group.rollouts}
    if form == "slime":
        assert [made[n].tokens for n in range(len(outputs))] == [2 * many for many in outputs]
    else:
        assert [made[n].characters for n in range(len(outputs))] == [2 * many for many in outputs]


def test_the_last_output_of_a_rollout_has_its_reward(tmp_path):
    rows = [sample(0, n, reward) | {"rollout_id": 5, "index": n} for n, reward in enumerate((0.0, 1.0))]
    rows += [sample(0, n, 0.0) | {"rollout_id": 6, "index": n, "status": "aborted"} for n in (2, 3)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = open_log([tmp_path / "0.jsonl"])
    assert group.rewards == (1.0, None)


def test_rollouts_of_areal_that_answered_several_times_are_one_group(tmp_path):
    """It writes what stands before the last `sum(loss_mask)` tokens as the prompt."""
    prompts = ["Q", "Q first answer, wrong:", "Q another, wrong:"]
    rows = [WRITERS["areal"][1](0, 0, n, float(n)) | {"prompt": prompt} for n, prompt in enumerate(prompts)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = open_log([tmp_path / "tasks.jsonl"])
    assert group.rewards == (0.0, 1.0, 2.0)
