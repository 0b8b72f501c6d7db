"""SkyRL's real server of Tinker's API on CPUs (JAX), with an embedded policy in float32 as its base.

TURNTREE_TINKER is the virtual environment that it runs in (`make test-tinker` makes one).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.engine.checkpoint import load_model, save_model
from turntree.engine.tokenizer import load_tokenizer
from turntree.stages.policy import resolve

VENV = os.environ.get("TURNTREE_TINKER")
BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 32,
    "train_micro_batch_size": 4,
    "sample_max_num_sequences": 32,
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass
class Server:
    """A server in a process group of its own, which may be killed and started again over the same checkpoints."""

    folder: Path
    base: Path
    port: int
    process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": f"{VENV}/bin:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(self.folder / "jax"))
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        command = [
            *("uv", "run", "--active", "--no-project", "-m", "skyrl.tinker.api", "--backend", "jax"),
            *("--base-model", str(self.base), "--backend-config", json.dumps(BACKEND)),
            *("--checkpoints-base", str(self.folder / "checkpoints")),
            *("--database-url", f"sqlite:///{self.folder / 'server.db'}"),
            *("--session-timeout-sec", "60", "--session-cleanup-interval-sec", "10"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).read()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
                time.sleep(0.5)
        raise TimeoutError((self.folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def opened(folder: Path, policy: str = "household") -> Server:
    """A server over a new folder, which answers."""
    found = resolve(policy)
    save_model(load_model(found, dtype="float32"), load_tokenizer(found), folder / "base")
    server = Server(folder, folder / "base", free_port())
    server.start()
    return server
