"""The engine `vllm` and a real vLLM server (`make test-vllm`): twenty changes of weights, a stale cache, a killed
server. The contract suite of engines runs over the same server."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tiny_models import tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import TurntreeError
from turntree.engine import vllm
from turntree.engine.limits import VllmConfig
from turntree.engine.teacher import ServedPolicy
from turntree.engine.vllm import VllmEngine, VllmServer
from turntree.train.config import LoRAConfig
from turntree.train.lora import add_adapter

pytestmark = pytest.mark.vllm
STOP = 9
LONG = tuple(range(10, 310))  # two blocks of the server's cache, and more


def engine_of(real_vllm, **settings):
    url, model = real_vllm
    return VllmEngine(VllmConfig(url=url, patience=600.0, **settings), model, tiny_tokenizer(), {STOP})


def wave(count=8):
    sampling = Sampling(max_tokens=12)
    return [GenerationRequest(prompt_ids=LONG[: 300 - seed % 2], sampling=sampling, seed=seed) for seed in range(count)]


def stir(model, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)


def difference(model, requests, completions):
    """The largest difference between the log-probabilities of the engine and of the model."""
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        row = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        begin = len(request.prompt_ids)
        with torch.no_grad():
            logprobs = model(input_ids=row).logits[0, begin - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, row[0, begin:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(completion.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("adapter", [False, True])
def test_twenty_changes_of_weights_leave_no_difference(real_vllm, adapter):
    _, model = real_vllm
    if adapter:
        add_adapter(model, LoRAConfig(rank=8))
    found, seconds = [], []
    with engine_of(real_vllm) as engine:
        for version in range(1, 21):
            stir(model, version)
            started = time.perf_counter()
            engine.update_weights(model, version)
            seconds.append(time.perf_counter() - started)
            completions = engine.generate(wave())
            assert {completion.policy_version for completion in completions} == {version}
            found.append(difference(model, wave(), completions))
    kind = "LoRA" if adapter else "whole weights"
    print(f"\n{kind}: largest difference of 20 syncs {max(found):.1e}, median sync {sorted(seconds)[10]:.2f} s")
    assert max(found) < 1e-4


def test_a_stale_cache_is_detected_and_stops_the_run(real_vllm, monkeypatch):
    change = VllmServer._change

    async def without_reset(self, path, body, needs):
        return None if path == "/reset_prefix_cache" else await change(self, path, body, needs)

    _, model = real_vllm
    with engine_of(real_vllm) as engine:
        engine.generate(wave())
        monkeypatch.setattr(VllmServer, "_change", without_reset)
        stir(model, 1)
        with pytest.raises(TurntreeError, match="stale") as caught:
            engine.update_weights(model, 1)
    print(f"\n{caught.value}")


def test_a_tied_head_that_is_left_behind_is_detected(real_vllm, monkeypatch):
    _, model = real_vllm
    write = vllm._written

    def without_head(model, above):
        weights = write(model, above)
        (weights.folder / "tied.safetensors").unlink()
        return weights

    with engine_of(real_vllm) as engine:
        monkeypatch.setattr(vllm, "_written", without_head)
        stir(model, 2)
        with pytest.raises(TurntreeError, match="other weights") as caught:
            engine.update_weights(model, 1)
    print(f"\n{caught.value}")


# httpx leaves the sockets of a server that died to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("adapter", [False, True])
def test_a_killed_server_costs_time_and_nothing_else(real_server, real_vllm, adapter):
    server, (_, model) = real_server[0], real_vllm
    if adapter:
        add_adapter(model, LoRAConfig(rank=8))
    with engine_of(real_vllm) as engine:
        stir(model, 3)
        engine.update_weights(model, 1)
        before = engine.generate(wave(16))
        tickets = [engine.submit(request) for request in wave(16)]
        os.killpg(server.child.pid, signal.SIGKILL)
        started, ends = time.perf_counter(), []
        while engine.in_flight:
            ends += engine.poll()
        print(f"\nback after {time.perf_counter() - started:.0f} s")
    assert sorted(end.ticket for end in ends) == tickets
    after = [end.completion for end in sorted(ends, key=lambda end: end.ticket)]
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert difference(model, wave(16), after) < 1e-4


def test_a_server_scores_the_tokens_of_a_prompt_as_the_policy_does(real_teacher):
    server, model = real_teacher
    paths = [LONG, LONG[:7], LONG[20:60]]
    for path, scored in zip(paths, ServedPolicy(f"{server.url}/v1", "policy").logprobs(paths), strict=True):
        row = torch.tensor([path])
        with torch.no_grad():
            logprobs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, row[0, 1:, None])[:, 0]
        assert float((own - torch.tensor(scored)).abs().max()) < 1e-4


def test_a_cancelled_request_ends_at_the_server(real_vllm):
    from urllib.request import Request, urlopen

    def running():
        asked = Request(f"{real_vllm[0]}/metrics", headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"})
        text = urlopen(asked).read().decode()
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        )

    with engine_of(real_vllm) as engine:
        endless = Sampling(max_tokens=700)
        engine.stop_ids = engine._reader.stop_ids = frozenset()
        tickets = [engine.submit(GenerationRequest(prompt_ids=LONG, sampling=endless, seed=s)) for s in range(4)]
        until = time.monotonic() + 60
        while running() < 4 and time.monotonic() < until:
            time.sleep(0.02)
        for ticket in tickets:
            engine.cancel(ticket)
        while running() and time.monotonic() < until:
            time.sleep(0.02)
        assert running() == 0 and engine.in_flight == 0
