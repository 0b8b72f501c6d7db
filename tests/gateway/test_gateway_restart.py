"""A gateway that is killed goes on where it was: no answer that was given is lost."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from gateway_world import ADMIN, HTTP, Timed, engine, renderer, tokenizer, words, world
from random_sessions import sequence_of

from routed import TellsPlaces, are_places
from turntree.core.tree import StopReason
from turntree.gateway.config import GatewayLimits, Reward
from turntree.gateway.merge import merge
from turntree.gateway.store import SessionStore, read_session

SERVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from gateway_world import engine, world
slow = lambda request: 1 if request.seed % 3 else 10**9
with world(engine(latency=slow), folder=Path({folder!r})) as gate:
    print(gate.url, flush=True)
    time.sleep(600)
"""
MESSAGES = [{"role": "user", "content": "What is it?"}]


def ask(url, key, messages):
    reply = HTTP.post(
        f"{url}/v1/chat/completions", json={"messages": messages}, headers={"authorization": f"Bearer {key}"}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def test_kill_9_loses_no_answer_and_the_sessions_go_on_with_the_same_draws(tmp_path):
    code = SERVER.format(tests=str(Path(__file__).parents[1] / "gateway"), folder=str(tmp_path))
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    url = process.stdout.readline().strip()
    opened = [
        HTTP.post(
            f"{url}/sessions", json={"task": f"t{i}", "seed": i}, headers={"authorization": f"Bearer {ADMIN}"}
        ).json()
        for i in range(12)
    ]

    def play(one):
        """Ask until the gateway dies; the dialogue as the agent has it."""
        messages = [*MESSAGES]
        with httpx.Client(timeout=60, trust_env=False) as client:
            for turn in range(200):
                try:
                    reply = client.post(
                        f"{url}/v1/chat/completions",
                        json={"messages": messages},
                        headers={"authorization": f"Bearer {one['key']}"},
                    )
                except httpx.TransportError:
                    break
                message = reply.json()["choices"][0]["message"]
                messages = [*messages, message, {"role": "user", "content": f"turn {turn}"}]
                if one is opened[0] and turn == 2:
                    os.kill(process.pid, signal.SIGKILL)
        return messages

    with ThreadPoolExecutor(len(opened)) as pool:
        dialogues = list(pool.map(play, opened))
    process.wait()
    process.stdout.close()
    lost = [len(dialogue) for dialogue in dialogues]
    with world(engine(), folder=tmp_path) as gate:
        assert len(gate.sessions) == len(opened)
        for one, dialogue in zip(opened, dialogues, strict=True):
            kept = gate.calls(one["session"])
            answered = [message["content"] for message in dialogue if message["role"] == "assistant"]
            assert [call.answer.content for call in kept][: len(answered)] == answered
            assert len(kept) - len(answered) in (0, 1)  # one may have been kept and not delivered
            before = len(kept)
            ask(gate.url, one["key"], dialogue)
            assert gate.calls(one["session"])[before].cause in ("start", "continue", "retry")
        again, other = opened[0], gate.open(task="t0", seed=0)
        assert lost[0] >= 3
        first = gate.calls(again["session"])[0].answer.content
        assert ask(gate.url, other["key"], MESSAGES)["content"] == first  # the draws are those of the task and seed


def test_a_row_that_was_cut_off_is_dropped_and_the_rest_goes_on(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        for _ in range(2):
            ask(gate.url, opened["key"], MESSAGES)
    path = SessionStore(tmp_path).path(opened["session"])
    path.write_bytes(path.read_bytes()[:-7])
    with world(folder=tmp_path) as gate:
        assert len(gate.calls(opened["session"])) == 1
        ask(gate.url, opened["key"], MESSAGES)
    assert len(read_session(SessionStore(tmp_path), opened["session"]).calls) == 2


def test_a_session_that_was_rewarded_when_the_gateway_died_is_over(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        gate.sessions.reward(gate.sessions.get(opened["session"]), Reward(reward=1.0))
    with world(folder=tmp_path) as gate:
        assert len(gate.sessions) == 0
    assert read_session(SessionStore(tmp_path), opened["session"]).reward == 1.0


def test_a_session_that_was_closed_when_the_gateway_died_does_not_begin_again(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
    SessionStore(tmp_path).append(opened["session"], {"closed": "it misbehaved"})
    with world(folder=tmp_path) as gate:
        assert len(gate.sessions) == 0
    assert read_session(SessionStore(tmp_path), opened["session"]).reason == "it misbehaved"


def test_a_reward_that_comes_too_late_is_refused_and_leaves_a_folder_that_a_gateway_can_start_on(tmp_path):
    """Its request is on its way while the session ends: without a reward, or with this one, which was posted twice."""
    body = json.dumps({"reward": 1.0}).encode()
    with world(folder=tmp_path) as gate:
        for path, ends, status in (("close", {}, b" 403 "), ("reward", {"reward": 1.0}, b" 200 ")):
            opened = gate.open()
            url = f"/sessions/{opened['session']}"
            with socket.create_connection(gate.url.removeprefix("http://").split(":")) as raw:
                key = f"Authorization: Bearer {opened['reward_key']}"
                raw.sendall(
                    f"POST {url}/reward HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                )
                time.sleep(0.3)  # its session is found
                assert gate.post(f"{url}/{path}", ends).status_code == 200
                raw.sendall(body)
                assert status in raw.recv(1000).split(b"\r\n")[0]
            rewarded = read_session(SessionStore(tmp_path), opened["session"]).reward
            assert rewarded == ends.get("reward") and not SessionStore(tmp_path).sessions()
    with world(folder=tmp_path) as gate:
        assert len(gate.sessions) == 0


def test_what_is_read_from_disk_equals_what_was_kept(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open(sample=3)
        first = ask(gate.url, opened["key"], MESSAGES)
        ask(gate.url, opened["key"], [*MESSAGES, first, {"role": "user", "content": "More"}])
        ask(gate.url, opened["key"], [{"role": "user", "content": "Else"}])
        live = gate.sessions.get(opened["session"])
        gate.post(f"/sessions/{opened['session']}/reward", {"reward": 0.25}, opened["reward_key"])
        assert read_session(SessionStore(tmp_path), opened["session"]) == live.value()


class Routed(TellsPlaces, Timed):
    pass


def test_the_experts_of_a_dialogue_are_kept_once_and_go_into_its_tree(tmp_path):
    policy = Routed(words, renderer().stop_ids, vocab_size=len(tokenizer()))
    with world(policy, folder=tmp_path) as gate:
        opened = gate.open()
        messages = [*MESSAGES]
        for _ in range(3):
            messages += [ask(gate.url, opened["key"], messages), {"role": "user", "content": "More"}]
        calls = gate.calls(opened["session"])
        gate.post(f"/sessions/{opened['session']}/reward", {"reward": 1.0}, opened["reward_key"])
    session = read_session(SessionStore(tmp_path), opened["session"])
    assert list(session.calls) == calls
    assert sum(len(call.completion.routes) for call in calls) == len(sequence_of(calls[-1])) - 1
    assert are_places(merge("t", [session]).tree)


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        ({"calls": 1}, StopReason.MAX_TURNS),
        ({"tokens": 1}, StopReason.MAX_TOKENS),
        ({"seconds": 600.0}, StopReason.MAX_SECONDS),
        ({"calls": 2}, StopReason.COMPLETED),
    ],
)
def test_a_session_that_ended_at_a_limit_says_which_and_so_does_its_leaf(tmp_path, limits, stop, monkeypatch):
    monkeypatch.setattr("turntree.gateway.server._SWEEP", 600.0)  # it would close the session, which then has no reward
    with world(folder=tmp_path, limits=GatewayLimits(**limits)) as gate:
        opened = gate.open()
        ask(gate.url, opened["key"], MESSAGES)
        live = gate.sessions.get(opened["session"])
        live.head = replace(live.head, opened=live.head.opened - limits.get("seconds", 0.0))
        again = gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"])
        assert again.status_code == (200 if stop is StopReason.COMPLETED else 403)
        gate.post(f"/sessions/{opened['session']}/reward", {"reward": 1.0}, opened["reward_key"])
    session = read_session(SessionStore(tmp_path), opened["session"])
    tree = merge(session.task_id, [session]).tree
    assert session.stop is stop and stop in {tree.stop_reason(leaf) for leaf in tree.leaves()}


def test_no_key_is_on_disk(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        ask(gate.url, opened["key"], MESSAGES)
        text = SessionStore(tmp_path).path(opened["session"]).read_text()
    for key in (opened["key"], opened["reward_key"], ADMIN):
        assert key not in text and key.rpartition(".")[2] not in text
    assert json.loads(text.splitlines()[0])["keys"].keys() == {"ask", "reward"}


def test_a_reward_may_be_posted_again_after_a_restart(tmp_path):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        url = f"/sessions/{opened['session']}/reward"
        assert gate.post(url, {"reward": 1.0}, opened["reward_key"]).status_code == 200
    with world(folder=tmp_path) as gate:
        assert gate.post(url, {"reward": 1.0}, opened["reward_key"]).status_code == 200
        assert gate.post(url, {"reward": 0.0}, opened["reward_key"]).status_code == 409
        assert gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"]).status_code == 403


def test_no_two_candidates_of_a_prompt_share_a_draw_whichever_was_under_way_at_a_kill(tmp_path):
    """The first takes long; the folder is copied as a kill would leave it."""
    served, asked = [], {"messages": MESSAGES}

    def late(request):
        served.append(request)
        return 3000 if len(served) == 1 else 1

    with world(engine(words, latency=late), folder=tmp_path / "killed") as gate:
        opened = gate.open(seed=5)
        first = threading.Thread(target=gate.post, args=("/v1/chat/completions", asked, opened["key"]))
        first.start()
        while not served:
            time.sleep(0.01)
        gate.post("/v1/chat/completions", asked, opened["key"])
        shutil.copytree(tmp_path / "killed", tmp_path / "restarted")
        first.join()
    with world(engine(words), folder=tmp_path / "restarted") as gate:
        gate.post("/v1/chat/completions", asked, opened["key"])
        said = [call.answer.content for call in gate.calls(opened["session"])]
    assert len(said) == len(set(said)) == 2
