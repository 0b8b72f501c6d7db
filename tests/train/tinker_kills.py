"""Kill -9 of the client, of the server and of both, with a network between them that loses, delays and doubles answers:

  TURNTREE_TINKER=VENV python tests/train/tinker_kills.py FOLDER [--kills 30] [--iterations 40] [--seed 0]

A run of `turntree train online` on SkyRL's real server (CPUs, JAX) is given again until it is done. Then the database
of the server, which has every request that it carried out, is held against the run's folder: no step twice or lost, no
group lost, no reward invented, and the trained tokens of the bill are those that lie in the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from skyrl_server import Server, free_port, opened

FATES = {"passed": 0.94, "request lost": 0.015, "answer lost": 0.015, "answer late": 0.015, "answer twice": 0.015}
SETTINGS = {
    "train.groups": 2,
    "train.group_size": 4,
    "train.max_turns": 8,  # a fifth of the games succeed
    "train.sampling.max_tokens": 12,
    "train.optimizer.learning_rate": 1e-3,
    "train.loss.kl_coefficient": 0.0,
    "checkpoints.every": 1,
    "check.tasks": 0,
    "count": 8,
    "device.carrier.timeout": 300,
}


@dataclass
class Network:
    """A proxy: what becomes of each request is drawn."""

    server: int
    draw: random.Random
    port: int = field(default_factory=free_port)
    seen: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._taken, "127.0.0.1", self.port, limit=2**26) as serving:
            await serving.serve_forever()

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passed(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            self.seen["broken"] += 1
        finally:
            writer.close()

    async def _passed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = [line for line in lines if line and not line.lower().startswith(b"connection:")]
        sizes = [int(line.split(b":")[1]) for line in headers if line.lower().startswith(b"content-length:")]
        body = await reader.readexactly(sum(sizes))
        (fate,) = self.draw.choices(list(FATES), list(FATES.values()))
        self.seen[fate] += 1
        if fate == "request lost":
            return
        there, to = await asyncio.open_connection("127.0.0.1", self.server)
        to.write(b"\r\n".join([first, *headers, b"Connection: close", b"", body]))
        answer = await there.read()
        to.close()
        if fate == "answer late":
            await asyncio.sleep(self.draw.uniform(0, 5))
        if fate != "answer lost":
            writer.write(answer * (1 + (fate == "answer twice")))
            await writer.drain()


def client(run: Path, base: Path, network: Network, iterations: int) -> subprocess.Popen[bytes]:
    settings = {**SETTINGS, "train.iterations": iterations}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "turntree", "train", "online", "--environment", "household"]
    command += ["--carrier", "tinker", "--model", str(base), "--out", str(run), *words]
    environment = {**os.environ, "TINKER_BASE_URL": f"http://127.0.0.1:{network.port}"}
    with (run.parent / "client.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def torment(folder: Path, server: Server, network: Network, draw: random.Random, options: Any) -> Counter[str]:
    """Run to the end, killed on the way; who was killed, and how often the run ended by itself."""
    told, since = Counter[str](), time.monotonic()
    while True:
        process = client(folder / "run", server.base, network, options.iterations)
        left = sum(told[name] for name in ("client", "server", "both")) < options.kills
        left = left and time.monotonic() - since < options.seconds
        try:
            code = process.wait(draw.uniform(0, options.span) if left else None)
        except subprocess.TimeoutExpired:
            victim = draw.choice(("client", "server", "both"))
            told[victim] += 1
            print(f"{time.monotonic() - since:.0f} s: kill -9 of {victim}", flush=True)
            if victim != "server":
                process.kill()
            if victim != "client":
                server.kill()
                server.start()
            code = process.wait()
        if code == 0:
            return told
        told["ended, given again"] += 1


def carried_out(database: Path) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Kind, adapter, question and answer of every request, in order."""
    kinds = "select request_type, model_id, request_data, result_data from futures where status = 'COMPLETED'"
    with sqlite3.connect(database) as found:
        rows = found.execute(f"{kinds} order by request_id").fetchall()
    return [(kind, model, json.loads(asked), json.loads(answer or "null") or {}) for kind, model, asked, answer in rows]


def in_weights(requests: Sequence[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Of every saved state, the steps and the trained tokens that lie in it: those before it in its own adapter, and
    those of the state that the adapter began with. Steps at rate 0, which measure the server, are none."""
    now: dict[str, tuple[int, int]] = {}
    waiting, kept = Counter[str](), dict[str, tuple[int, int]]()
    for kind, model, asked, _ in requests:
        if kind == "FORWARD_BACKWARD":
            waiting[model] += sum(len(datum["loss_fn_inputs"]["target_tokens"]["data"]) for datum in asked["data"])
        elif kind == "OPTIM_STEP":
            steps, tokens = now.get(model, (0, 0))
            if asked["adam_params"]["learning_rate"]:
                now[model] = steps + 1, tokens + waiting[model]
            waiting[model] = 0
        elif kind == "SAVE_WEIGHTS":
            kept[f"tinker://{model}/weights/{asked['path']}"] = now.get(model, (0, 0))
        elif kind == "LOAD_WEIGHTS":
            now[model] = kept[f"tinker://{asked['source_model_id']}/weights/{asked['checkpoint_id']}"]
    return kept


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_against(run: Path, database: Path, iterations: int) -> Mapping[str, Any]:
    """The run's folder and the server's log, compared. Raises AssertionError where they differ."""
    requests, metrics = carried_out(database), [row for row in rows(run / "metrics.jsonl") if row["step"]]
    weights = json.loads((run / "model" / "tinker.json").read_text())["weights"]
    steps, tokens = in_weights(requests)[weights]
    cost, groups = json.loads((run / "cost.json").read_text()), rows(run / "rollouts.jsonl")
    sampled = [answer["sequences"] for kind, _, _, answer in requests if kind == "SAMPLE" and "sequences" in answer]
    told = {
        "iterations": [row["step"] for row in metrics] == list(range(1, iterations + 1)),
        "steps in the weights": steps,
        "steps of the run": sum(row["trained_groups"] > 0 for row in metrics),
        "trained tokens in the weights": tokens,
        "trained tokens of the bill": cost["trained_tokens"],
        "optimizer steps of all adapters": sum(
            kind == "OPTIM_STEP" and asked["adam_params"]["learning_rate"] > 0 for kind, _, asked, _ in requests
        ),
        "tokens that the server sampled": sum(len(one["tokens"]) for found in sampled for one in found),
        "sampled tokens of the bill": cost["decoded_tokens"],
        "groups": len(groups),
        "steps with a gradient": sum(row.get("grad_norm", 0) > 0 for row in metrics),
    }
    assert told["iterations"] and told["groups"] == iterations * SETTINGS["train.groups"], told
    assert told["steps in the weights"] == told["steps of the run"], told
    assert told["trained tokens in the weights"] == told["trained tokens of the bill"], told
    assert told["tokens that the server sampled"] >= told["sampled tokens of the bill"], told
    censored = [reason for row in metrics for reason in row.get("censored_reasons", {})]
    assert not censored, censored
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--span", type=float, default=90, help="a kill comes within so many seconds of a start")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nobody is killed after so many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    draw = random.Random(options.seed)
    server = opened(options.folder)
    network = Network(server.port, random.Random(options.seed + 1))
    network.start()
    started = time.monotonic()
    try:
        killed = torment(options.folder, server, network, draw, options)
    finally:
        server.kill()
    found = held_against(options.folder / "run", options.folder / "server.db", options.iterations)
    print(json.dumps({"killed": killed, "requests": network.seen, **found}, indent=2))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
