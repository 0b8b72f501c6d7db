"""`gateway:COMMAND`: programs are started for rollouts, and what becomes of them becomes of their rewards."""

import itertools
import json
import sys
import threading
import time

import pytest
from gateway_world import SAMPLING, engine, renderer, spelled, tokenizer

from rollout_view import rollouts_of
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.tree import StopReason
from turntree.env.tasks import open_tasks
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import grow, player_of
from turntree.rollout.rewards import RewardSum, WeightedReward, build_rewards
from turntree.rollout.scheduler import SchedulerConfig

AGENT = """
import json, os, pathlib, signal, subprocess, sys, time, urllib.error, urllib.request

task = json.load(open(os.environ["TURNTREE_TASK"]))
do = task["do"]

def post(url, body, key):
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"messages": messages}, os.environ["OPENAI_API_KEY"])["choices"][0]["message"]

assert pathlib.Path.cwd() == pathlib.Path(os.environ["TURNTREE_TASK"]).parent
if do == "nothing":
    sys.exit(0)
messages = [{"role": "user", "content": do}]
for turn in range(2):
    messages += [ask(messages), {"role": "user", "content": "more"}]
if do == "crash":
    raise RuntimeError("out of luck")
if do == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if do == "sleep":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
if do == "loop":
    while True:
        messages += [ask(messages), {"role": "user", "content": "more"}]
if do == "overrun":
    try:
        while True:
            messages += [ask(messages), {"role": "user", "content": "more"}]
    except urllib.error.HTTPError:
        os.kill(os.getpid(), 9)
if do == "compact":
    try:
        ask([{"role": "user", "content": "x" * 200000}])
    except urllib.error.HTTPError:
        ask(messages)
    raise RuntimeError("out of luck")
if do in ("post", "post and crash"):
    post(os.environ["TURNTREE_REWARD_URL"], {"reward": 0.75, "reason": "posted"}, os.environ["TURNTREE_REWARD_KEY"])
if do == "post and crash":
    sys.exit(3)
last = {"number": "0.5", "object": json.dumps({"reward": 1, "success": False, "reason": "so so"}), "silent": "done",
        "null": json.dumps({"reward": None, "reason": "no idea"}), "post": "", "nan": "NaN", "word": '"1"'}[do]
print("thinking...")
print(last)
"""
TALKER = """
import json, os, urllib.request

def ask(messages):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]

def told(text, role="user"):
    return {"role": role, "content": text}

system, task, more = told("Be brief.", "system"), told("Which way?"), told("more")
lost = ask([system, task])  # and asked again
first = ask([system, task])
second = ask([system, task, first, more])
ask([told("You help.", "system"), told("1 + 1"), told("two", "assistant"), task])  # a sub-agent, with an example
third = ask([system, task, first, more, second, more])
ask([system, told("In short: which way?"), second, more, third, told("Sum it up.")])  # a history that was compacted
print(json.dumps({"reward": 0.25, "success": True}))
"""
ENDS = {  # what the agent does: its reward, the stop, a word of the reason
    "number": (0.5, StopReason.COMPLETED, "last line"),
    "object": (1.0, StopReason.COMPLETED, "so so"),
    "post": (0.75, StopReason.COMPLETED, "posted"),
    "post and crash": (0.75, StopReason.COMPLETED, "posted"),
    "crash": (None, StopReason.ENVIRONMENT_ERROR, "out of luck"),
    "kill": (None, StopReason.ENVIRONMENT_ERROR, "SIGKILL"),
    "silent": (None, StopReason.ENVIRONMENT_ERROR, "no reward"),
    "null": (None, StopReason.ENVIRONMENT_ERROR, "no idea"),
    "nan": (None, StopReason.ENVIRONMENT_ERROR, "no reward"),
    "word": (None, StopReason.ENVIRONMENT_ERROR, "no reward"),
    "sleep": (None, StopReason.ENVIRONMENT_ERROR, "longer than"),
    "loop": (None, StopReason.ENVIRONMENT_ERROR, "has made its 5 calls"),
    "nothing": (None, StopReason.ENVIRONMENT_ERROR, "no model call"),
}


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The name of the part, whose command names a file of the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    return f"gateway:{sys.executable} -S agent.py"


def tasks_file(tmp_path, *what):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"do": each}) + "\n" for each in what))
    return str(path)


def played(agent, tmp_path, what, *, rewards=None, group_size=2, seed=0, policy=None, calls=5, **options):
    config = SchedulerConfig(group_size=group_size, episodes=EpisodeConfig(max_turns=calls, sampling=SAMPLING))
    part = Part(agent, {"tasks": tasks_file(tmp_path, *what), **options})
    held_out = {"train": len(what)} if len(what) > 3 else {"train": 1}
    with open_tasks(part, held_out) as opened:
        player = player_of(opened.of("train"), policy or engine(), renderer(), config, rewards=rewards)
        return list(player.run(opened.of("train"), seed=seed))


def test_every_end_of_an_agent_has_a_name_and_only_a_reward_that_was_given_counts(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("turntree.env.adapted.FRACTIONS", {"train": 1.0, "dev": 0.0, "test": 0.0})
    groups = played(agent, tmp_path, list(ENDS), group_size=1, seconds=8.0, agents=4)
    found = {group.task.row["do"]: group for group in groups}
    assert set(found) == set(ENDS)
    for what, (reward, stop, word) in ENDS.items():
        tree, rewards = found[what].tree, found[what].rewards
        ((leaf, verdict),) = rewards.verdicts.items()
        assert (verdict.reward, tree.stop_reason(leaf)) == (reward, stop), what
        assert word in verdict.reason, (what, verdict.reason)
        assert sum(node.sampled for node in tree) == {"nothing": 0, "loop": 5}.get(what, 2)


def test_the_samples_of_a_group_differ_and_the_same_seed_gives_the_same_trees(agent, tmp_path):
    def texts(seed):
        (group,) = played(agent, tmp_path, ["number"], seed=seed, group_size=3)
        return [(r.token_ids, [node.messages for node in r.nodes]) for r in rollouts_of(group.tree)]

    first = texts(1)
    assert len({ids for ids, _ in first}) == 3
    assert first == texts(1) and first != texts(2)


def test_reward_functions_judge_what_the_agent_said(agent, tmp_path, monkeypatch):
    judge = "def length(episode):\n    return float(len(episode.turns))\n"
    (tmp_path / "judges.py").write_text(f"{judge}success = length\n")
    monkeypatch.syspath_prepend(tmp_path)
    both = build_rewards([Part("judges:length"), Part("environment")])
    (group,) = played(agent, tmp_path, ["number"], rewards=both)
    assert {verdict.reward for verdict in group.rewards.verdicts.values()} == {2.5}
    for name in ("length", "success"):  # a function of the user's may have the name of one that only repeats
        alone = build_rewards([Part(f"judges:{name}")])
        (group,) = played(agent, tmp_path, ["silent"], rewards=alone)
        assert {verdict.reward for verdict in group.rewards.verdicts.values()} == {2.0}
    (group,) = played(agent, tmp_path, ["silent"], rewards=both)  # there is nothing that `environment` could give
    assert {verdict.reward for verdict in group.rewards.verdicts.values()} == {None}


def test_reward_functions_see_the_task_and_all_that_was_said_in_the_calls_of_an_agent(agent, tmp_path):
    def answer(prompt, seed):
        return spelled(("and so on " * 10) if "Sum it up." in tokenizer().decode(prompt) else f"go {seed % 1000}")

    seen = []
    rewards = RewardSum([WeightedReward("look", 1.0, lambda episode: float(len(seen) + bool(seen.append(episode))))])
    (tmp_path / "agent.py").write_text(TALKER)
    options = {"rewards": rewards, "policy": engine(answer), "calls": 6}
    (group,) = played(agent, tmp_path, ["talk"], **options)
    ends = {end: verdict for end, verdict in group.rewards.verdicts.items() if verdict.reward is not None}
    assert len(ends) == len(seen) == 2
    for end, verdict in ends.items():
        episode, tree = seen[int(verdict.reward)], group.tree
        turns = [tree[node].messages[0] for node in tree.nodes_of(end) if tree[node].sampled]
        assert list(episode.turns) == turns and len(turns) == 6
        told = [[message.content for message in each.messages] for each in episode.observations]
        helper = ["You help.", "1 + 1", "two", "Which way?"]
        assert told == [
            ["Be brief.", "Which way?"],
            [],
            ["more"],
            helper,
            ["more"],
            ["In short: which way?", "Sum it up."],
            [],
        ]
        rounds = itertools.zip_longest([each.messages for each in episode.observations], turns)
        assert list(episode.messages) == [one for given, turn in rounds for one in (*given, *([turn] if turn else []))]
        assert (episode.stop, episode.cut_turns) == (tree.stop_reason(end), 1) == (StopReason.MAX_TOKENS, 1)
        last = episode.observations[-1]
        assert (last.done, last.success, last.reward, episode.reward) == (True, True, 0.25, 0.25)
        assert not any(each.done for each in episode.observations[:-1])


def test_reward_functions_judge_the_agents_of_a_task_in_the_thread_that_asked_for_them(agent, tmp_path):
    seen, two, judging = [], threading.Barrier(2, timeout=10), threading.Lock()

    def plain(episode):
        assert judging.acquire(blocking=False), "another episode is judged at the same time"
        time.sleep(0.2)
        seen.append(threading.current_thread())
        judging.release()
        return 1.0

    def waiting(episode):
        return float(two.wait() >= 0)

    waiting.concurrency = 2
    functions = [WeightedReward(function.__name__, 1.0, function) for function in (plain, waiting)]
    (group,) = played(agent, tmp_path, ["number"], rewards=RewardSum(functions), group_size=4)
    assert seen == 4 * [threading.main_thread()]
    told = [(verdict.reward, verdict.parts) for verdict in group.rewards.verdicts.values()]
    assert told == 4 * [(2.0, {"plain": 1.0, "waiting": 1.0})]


def test_a_session_that_ran_into_a_limit_may_have_a_reward_for_that(agent, tmp_path):
    (group,) = played(agent, tmp_path, ["loop"], limit_reward=-1.0)
    ends = {(verdict.reward, group.tree.stop_reason(leaf)) for leaf, verdict in group.rewards.verdicts.items()}
    assert ends == {(-1.0, StopReason.MAX_TURNS)}


def test_a_limit_that_an_agent_got_over_is_not_why_it_crashed(agent, tmp_path):
    """Its context was full, it went on with less of it, and then failed: that is a failure, and no reward."""
    (group,) = played(agent, tmp_path, ["compact"], limit_reward=-1.0)
    (verdict, _) = group.rewards.verdicts.values()
    assert verdict.reward is None and "out of luck" in verdict.reason and "context" not in verdict.reason


def test_a_limit_is_not_why_an_agent_was_killed(agent, tmp_path):
    (group,) = played(agent, tmp_path, ["overrun"], limit_reward=-1.0)
    assert all(v.reward is None and "SIGKILL" in v.reason for v in group.rewards.verdicts.values())


def test_an_agent_that_never_asks_is_an_error_of_the_command_and_not_a_run_without_rewards(agent, tmp_path):
    with pytest.raises(InputError, match="by hand"):
        played(agent, tmp_path, ["nothing"])


def test_a_task_that_breaks_its_agent_is_censored_also_where_it_is_the_first(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("turntree.env.adapted.FRACTIONS", {"train": 1.0, "dev": 0.0, "test": 0.0})
    groups = played(agent, tmp_path, ["nothing", "number", "object", "post"], group_size=1, agents=1)
    found = {group.task.row["do"]: one.reward for group in groups for one in group.rewards.verdicts.values()}
    assert found == {"nothing": None, "number": 0.5, "object": 1.0, "post": 0.75}


def test_a_command_that_never_works_ends_also_a_run_without_end(agent, tmp_path):
    with open_tasks(Part(agent, {"tasks": tasks_file(tmp_path, "nothing")}), {"train": 1}) as opened:
        tasks = opened.of("train")
        player = player_of(tasks, engine(), renderer(), SchedulerConfig(group_size=1))
        with pytest.raises(InputError, match="by hand"):
            list(player.run(itertools.repeat(tasks[0]), seed=0))


def test_a_policy_that_fails_ends_the_run(agent, tmp_path):
    class Broken:
        def __init__(self):
            self.inner = engine()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def poll(self, timeout=None):
            raise RuntimeError("the policy diverged")

    with pytest.raises(Exception, match="diverged"):
        played(agent, tmp_path, ["number"], policy=Broken())


def test_folders_of_agents_stay_where_that_is_asked(agent, tmp_path):
    kept = tmp_path / "kept"
    for _ in range(2):  # as every held-out check does
        played(agent, tmp_path, ["crash"], folder=str(kept))
    assert all("out of luck" in (one / "stderr.txt").read_text() for one in kept.iterdir())
    assert len(list(kept.iterdir())) == 4


def test_an_evaluation_plays_agents_too(agent, tmp_path):
    with open_tasks(Part(agent, {"tasks": tasks_file(tmp_path, "number")}), {"train": 1}) as opened:
        ((tree, rewards),) = grow(
            opened.of("train"), engine(), renderer(), EpisodeConfig(sampling=SAMPLING), group_size=2, seed=0
        )
    assert [verdict.reward for verdict in rewards.verdicts.values()] == [0.5, 0.5] and tree.task_id


def test_what_cannot_be_is_refused_in_one_line(agent, tmp_path):
    with pytest.raises(InputError, match="no program"), open_tasks(Part("gateway:no-such-program-here"), {"train": 1}):
        pass
    with pytest.raises(InputError, match="gateway:COMMAND"), open_tasks(Part("gateway"), {"train": 1}):
        pass
    with open_tasks(Part(agent), {"train": 2}) as opened:
        task = opened.of("train")[0]
        with pytest.raises(InputError, match="train online or evaluate"):
            task.reset()


def test_a_policy_that_spells_is_seen_as_it_sampled(agent, tmp_path):
    (group,) = played(agent, tmp_path, ["number"], policy=engine(lambda prompt, seed: spelled("one")))
    assert {node.token_ids for node in group.tree if node.sampled} == {spelled("one")}
