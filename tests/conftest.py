"""Shared fixtures: where the real data lie, and one thread for tiny models."""

import contextlib
import copy
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: two OpenMP threads on a tiny model can be a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

# A shell starts what it puts into the background with interrupts ignored; commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no defect: hypothesis fails a test whose example takes 200 ms unless it is told otherwise.
hypothesis.settings.register_profile("turntree", deadline=None)
hypothesis.settings.load_profile("turntree")

REPOSITORY = Path(__file__).resolve().parents[1]
VLLM = "TURNTREE_VLLM"  # the virtual environment of a vLLM server, for the tests marked so
CONTAINERS = "TURNTREE_CONTAINERS"  # a container daemon can be used, and has the image of recipes/container_tasks.py


def shared_data_path() -> Path:
    return Path(os.environ.get("TURNTREE_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped where a checkout has none."""
    path = shared_data_path()
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}; set TURNTREE_SHARED_DATA")
    return path


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """The test is skipped where this machine offers no sandbox under the usual settings."""
    from turntree.core.errors import InputError
    from turntree_worlds.sandboxes.sandbox import Sandbox

    try:
        Sandbox().close()
    except InputError as error:
        pytest.skip(f"no sandbox here: {error}")


class RealServer:
    """A vLLM server, started as `turntree serve` starts it, and again whenever it ends."""

    def __init__(self, config: Any, model: Path, log: Path) -> None:
        from turntree.engine.vllm_server import command

        self.url, (words, variables) = config.url, command(config, model)
        self.key, self.ended = variables["VLLM_API_KEY"], False

        def keep() -> None:
            while not self.ended:
                boot = [*words, "--fingerprint-value", uuid.uuid4().hex]  # the last one counts
                with log.open("ab") as said:
                    self.child = subprocess.Popen(boot, env=variables, stdout=said, stderr=said, start_new_session=True)
                self.child.wait()

        threading.Thread(target=keep, daemon=True).start()

    def wait(self) -> None:
        asked = urllib.request.Request(f"{self.url}/health", headers={"Authorization": f"Bearer {self.key}"})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5.0):
                return
            time.sleep(0.5)

    def end(self) -> None:
        self.ended = True
        os.killpg(self.child.pid, signal.SIGKILL)


@contextlib.contextmanager
def _real(folder: Path, lora_rank: int) -> Iterator[tuple[RealServer, Any]]:
    from tiny_models import tiny_model, tiny_tokenizer
    from turntree.engine.vllm_server import ServeConfig

    model = tiny_model(hidden_size=128)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = ServeConfig(venv=os.environ[VLLM], port=port, max_context=1024, lora_rank=lora_rank)
    server = RealServer(config, folder / "model", folder / "server.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", server.key)  # which its engines send
        server.wait()
        yield server, model
    server.end()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Any]]:
    """A real vLLM server of a tiny model, and the model (`make test-vllm`)."""
    with _real(tmp_path_factory.mktemp("real-vllm"), 8) as found:
        yield found


@pytest.fixture
def real_teacher(tmp_path: Path) -> Iterator[tuple[RealServer, Any]]:
    """One without adapters: with them vLLM 0.32 for CPUs ends where it scores a prompt."""
    with _real(tmp_path, 0) as found:
        yield found


@pytest.fixture
def real_vllm(real_server: tuple[Any, Any]) -> tuple[str, Any]:
    """The URL of the server, which is brought to its first weights again, and a copy of its model."""
    from tiny_models import tiny_tokenizer
    from turntree.engine.limits import VllmConfig
    from turntree.engine.vllm import VllmEngine

    server, model = real_server
    VllmEngine(VllmConfig(url=server.url), model, tiny_tokenizer(), {9}).close()
    return server.url, copy.deepcopy(model)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a real server is not collected without one."""
    for marker, variable in (("vllm", VLLM), ("containers", CONTAINERS)):
        if variable not in os.environ:
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]


@functools.cache
def no_container() -> str | None:
    """Why no container can be started here; None where one was."""
    from container_tasks import IMAGE

    from turntree.core.errors import InputError
    from turntree.core.foreign import EnvironmentFault
    from turntree.env.container import ContainerHost, Snapshot
    from turntree.env.container_shell import ContainerShell

    try:
        with ContainerHost() as host:
            ContainerShell(host, Snapshot(host.image(IMAGE))).run("true")
    except (InputError, EnvironmentFault) as error:
        return f"no container can be started here: {error}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("containers") is not None and (reason := no_container()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="module")
def a_module_ends_in_the_folder_that_the_suite_began_in(pytestconfig: pytest.Config) -> Iterator[None]:
    """Else later tests find files of the module beside them: one failed only behind a certain other suite."""
    yield
    assert Path.cwd() == pytestconfig.invocation_params.dir


@pytest.fixture(autouse=True)
def forget_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test imports from a temporary folder is gone after it, and so are such folders on the path: the next test
    may write another module of the same name. What a fixture of wider scope imported stays as long as that lives."""
    temporary, modules, path = tmp_path_factory.getbasetemp().resolve(), set(sys.modules), set(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if any(place.is_relative_to(temporary) for place in _places(sys.modules[name])):
            del sys.modules[name]
    sys.path[:] = [each for each in sys.path if each in path or not Path(each).resolve().is_relative_to(temporary)]


def _places(module: object) -> list[Path]:
    """The file of a module, or the folders of a package that has none."""
    file = getattr(module, "__file__", None)
    return [Path(place).resolve() for place in ([file] if file else list(getattr(module, "__path__", ())))]
