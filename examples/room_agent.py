"""An agent that was not written for a trainer: a loop on the OpenAI SDK that looks for a thing in a room.

It reads its room from a file, asks an OpenAI-compatible server what to do, does it, and prints what came of it. The
game is that of `hide_and_seek.py`, so that the same rooms can be trained on without an agent.

    python examples/room_agent.py 300 > rooms.jsonl
    turntree train online --environment "gateway:python examples/room_agent.py" --tasks rooms.jsonl --count 200 \
        --max-turns 2 --max-tokens 24 --learning-rate 1e-3 --out runs/agent
"""

import json
import os
import sys
from pathlib import Path

from hide_and_seek import HideAndSeek, tasks
from openai import OpenAI

from turntree import Message


def play(room: HideAndSeek) -> bool:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where to ask, and who is asking
    said = [{"role": "user", "content": message.content} for message in room.reset()]
    while True:
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=said)
        answer = reply.choices[0].message.content or ""
        told = room.step(Message("assistant", answer))
        if told.done:
            return bool(told.success)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": told.messages[0].content}]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for room in tasks("train", int(sys.argv[1]), seed=0):
            print(json.dumps({"thing": room.thing, "places": room.places, "tries": room.tries}))
    else:
        task = json.loads(Path(os.environ["TURNTREE_TASK"]).read_text())
        found = play(HideAndSeek(task["id"], task["thing"], task["places"], task["tries"]))
        print(json.dumps({"reward": float(found), "success": found}))  # the last line is the reward
