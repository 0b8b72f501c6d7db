"""The engine `vllm` against a server of its protocol: weights that arrive, weights that do not, servers that die."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import pytest
import torch

from fake_vllm import FakeVllm, running
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine.endpoint import Server
from turntree.engine.limits import VllmConfig
from turntree.engine.vllm import Router, VllmEngine, VllmFollower
from turntree.train.config import LoRAConfig
from turntree.train.lora import add_adapter

TOKENIZER = tiny_tokenizer()
STOP = 9
PROMPT = tuple(range(10, 50))


@contextlib.contextmanager
def sampling(*fakes, model=None, **settings):
    """The engine over these servers, with the policy `model` (default: that of the servers)."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running(fake)) for fake in fakes]
        config = VllmConfig(url=",".join(urls), **{"patience": 5.0, **settings})
        yield stack.enter_context(VllmEngine(config, model or tiny_model(), TOKENIZER, {STOP}))


def request(seed=0, prompt=PROMPT, **sampling):
    return GenerationRequest(prompt_ids=prompt, sampling=Sampling(**{"max_tokens": 6, **sampling}), seed=seed)


def stirred(model, seed=0):
    """Move every trainable weight, as a large update would."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def expected(model, completion, prompt=PROMPT, temperature=1.0):
    row = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=row).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0].tolist()


def test_an_engine_that_nobody_holds_is_gone_with_its_model():
    with running(FakeVllm(tiny_model())) as url:
        engine = VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP})
        held = weakref.ref(engine)
        del engine
        gc.collect()
        assert held() is None


# weights


@pytest.mark.parametrize("adapter", [False, True])
def test_after_every_sync_the_server_samples_from_the_weights_of_the_trainer(adapter):
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    if adapter:
        add_adapter(policy, LoRAConfig(rank=2))
    with sampling(fake, model=policy) as engine:
        for version in range(1, 4):
            engine.update_weights(stirred(policy, version), version)
            (found,) = engine.generate([request(version)])
            assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)
            assert found.policy_version == version
    names = [body["lora_name"] for body in fake.of("/v1/load_lora_adapter")]
    assert len(names) == len(set(names)) == (4 if adapter else 0), "an adapter never comes back under an old name"
    assert len(fake.adapters) == (1 if adapter else 0), "adapters of earlier versions are taken away"


def test_a_token_without_its_log_probability_is_not_trained_on(monkeypatch):
    """It would count as certain: of a server, or one before it, that keeps the stop
    token to itself."""

    def silent(self, body):
        status, answer = complete(self, body)
        (choice,) = answer["choices"]
        kept = {name: values[:-1] for name, values in choice["logprobs"].items()}
        return status, {**answer, "choices": [{**choice, "logprobs": kept, "finish_reason": "stop"}]}

    complete = FakeVllm._complete
    with sampling(FakeVllm(tiny_model())) as engine:
        monkeypatch.setattr(FakeVllm, "_complete", silent)
        with pytest.raises(InputError, match="does not report the id and the log-probability of every token"):
            engine.generate([request()])


def test_a_server_with_other_weights_gets_those_of_the_policy():
    """A run that resumes finds the weights of the killed one."""
    fake = FakeVllm(tiny_model(seed=5))
    with sampling(fake) as engine:
        (found,) = engine.generate([request()])
    assert found.logprobs == pytest.approx(expected(tiny_model(), found), abs=1e-4)


def test_a_stale_cache_stops_the_run_and_says_why():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    with sampling(fake, model=policy) as engine:
        engine.generate([request()])
        fake.stale = True
        with pytest.raises(
            TurntreeError, match=r"log-probabilities differ by .* cache or its head may be stale"
        ) as caught:
            engine.update_weights(stirred(policy), 1)
    assert "resume" in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_stale_only_behind_a_served_prompt_is_found_too():
    """The fixed probe may have been driven out of the server's cache."""
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    with sampling(fake, model=policy) as engine:
        engine.generate([request()])
        fake.stale = True
        for key in [key for key in fake._kept if key[1] != PROMPT]:
            del fake._kept[key]
        with pytest.raises(TurntreeError, match="other weights"):
            engine.update_weights(stirred(policy), 1)


def test_a_tied_head_is_sent_by_its_own_name():
    """vLLM on a CPU keeps a copy of a tied head, which whole weights without this name leave behind."""
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    assert policy.config.tie_word_embeddings
    with sampling(fake, model=policy) as engine:
        engine.update_weights(stirred(policy), 1)
        assert torch.equal(fake._head, policy.get_output_embeddings().weight)


def test_a_server_that_takes_no_weights_is_refused_with_what_to_start():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    fake.dev = False
    with sampling(fake, model=policy) as engine, pytest.raises(InputError, match=r"HTTP 404.*turntree serve"):
        engine.update_weights(stirred(policy), 1)


def test_a_server_that_cannot_see_the_folder_is_refused_by_name(monkeypatch):
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    fake.hook = lambda path, body: 500 if path == "/collective_rpc" else None
    with sampling(fake, model=policy) as engine, pytest.raises(InputError, match=r"device\.engine\.folder"):
        engine.update_weights(stirred(policy), 1)


def test_weights_do_not_change_while_requests_are_in_flight():
    with sampling(FakeVllm(tiny_model())) as engine:
        engine.submit(request())
        with pytest.raises(TurntreeError, match="in flight"):
            engine.update_weights(tiny_model(), 1)


def test_log_probabilities_before_the_temperature_are_refused():
    fake = FakeVllm(tiny_model())
    fake.raw = True
    with pytest.raises(InputError, match="processed_logprobs"), sampling(fake):
        pass
    with sampling(FakeVllm(tiny_model())) as engine:
        (found,) = engine.generate([request(temperature=0.7)])
        assert found.logprobs == pytest.approx(expected(tiny_model(), found, temperature=0.7), abs=1e-4)


# faults


def refuse(statuses):
    """A hook that answers completions with these statuses, one by one, before it lets them through."""
    left = list(statuses)
    return lambda path, body: left.pop(0) if left and path == "/v1/completions" else None


def test_a_server_that_drops_connections_loses_no_request():
    fake = FakeVllm(tiny_model())
    with sampling(fake) as engine:
        wave = [request(seed) for seed in range(4)]
        alone = engine.generate(wave)
        fake.hook = refuse(["drop"] * 3)
        assert [one.token_ids for one in engine.generate(wave)] == [one.token_ids for one in alone]


def test_a_connection_that_breaks_at_a_working_server_does_not_count_as_its_death():
    """Servers close idle connections, also under a request that is about to use one."""
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    add_adapter(policy, LoRAConfig(rank=2))
    with sampling(fake, model=stirred(policy)) as engine:
        once = ["drop"]
        fake.hook = lambda path, body: once.pop() if once and path == "/v1/completions" else None
        assert engine.generate([request()])[0].finish in ("stop", "length")
        assert all(server.up for server in engine._servers) and len(fake.of("/v1/load_lora_adapter")) == 1


def test_a_change_of_weights_whose_answer_is_lost_is_made_again():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    add_adapter(policy, LoRAConfig(rank=2))
    with sampling(fake, model=policy) as engine:
        once = ["mute"]
        fake.hook = lambda path, body: once.pop() if once and path == "/v1/load_lora_adapter" else None
        engine.update_weights(stirred(policy), 1)
        (found,) = engine.generate([request()])
        assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)
        assert len(fake.adapters) == 1


def test_a_server_that_was_started_again_gets_the_current_weights_before_it_answers_for_them():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    with sampling(fake, model=policy) as engine:
        engine.update_weights(stirred(policy), 1)
        fake.boot, fake.model, fake._head = "2", (fresh := tiny_model()), fresh.lm_head.weight.detach().clone()
        fake._kept.clear()
        (found,) = engine.generate([request()])
        assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)
        assert len(fake.of("/collective_rpc")) == 2


def test_a_server_without_the_adapter_gets_it_again():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    add_adapter(policy, LoRAConfig(rank=2))
    with sampling(fake, model=stirred(policy)) as engine:
        fake.boot = "2"
        fake.adapters.clear()
        (found,) = engine.generate([request()])
        assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)


def test_a_server_that_only_seemed_lost_keeps_no_adapter_of_an_earlier_version():
    policy, first, second = tiny_model(), FakeVllm(tiny_model()), FakeVllm(tiny_model())
    add_adapter(policy, LoRAConfig(rank=2))
    with sampling(first, second, model=policy) as engine:
        first.hook = lambda path, body: "drop"
        engine.generate([request(seed) for seed in range(8)])
        assert [server.up for server in engine._servers] == [False, True]
        engine.update_weights(stirred(policy), 1)
        first.hook = lambda path, body: None
        until = time.monotonic() + 60
        while not engine._servers[0].up and time.monotonic() < until:
            time.sleep(0.02)
        assert list(first.adapters) == list(second.adapters) and len(first.adapters) == 1


def test_requests_of_a_dead_server_go_to_another_one():
    first, second = FakeVllm(tiny_model()), FakeVllm(tiny_model())
    with sampling(first, second) as engine:
        first.hook = second.hook = lambda path, body: time.sleep(0.02)
        wave = [request(seed) for seed in range(8)]
        engine.generate(wave)
        busy = first if len(first.of("/v1/completions")) > len(second.of("/v1/completions")) else second
        busy.hook = lambda path, body: "drop"
        assert len(engine.generate(wave)) == 8


def test_when_no_server_comes_back_the_run_stops_and_can_be_resumed():
    fake = FakeVllm(tiny_model())
    with sampling(fake, patience=0.5) as engine:
        fake.hook = lambda path, body: "drop"
        engine.submit(request())
        engine.submit(request(1))
        with pytest.raises(TurntreeError, match=r"no server answered for 0\.5 s .*; nothing is lost: .* to resume"):
            engine.poll()
        assert engine.in_flight == 0


def test_a_request_that_hangs_on_a_working_server_is_its_own_fault():
    fake = FakeVllm(tiny_model())
    with sampling(fake, timeout=0.5) as engine:
        fake.hook = lambda path, body: time.sleep(1.0) if body.get("prompt") == [1, 2] else None
        slow, fine = engine.submit(request(prompt=(1, 2))), engine.submit(request())
        ends = {end.ticket: end for _ in range(2) for end in engine.poll()}
        assert "no whole answer" in ends[slow].fault or "timed out" in ends[slow].fault
        assert ends[fine].fault is None


def test_a_server_that_hangs_altogether_counts_as_gone():
    fake = FakeVllm(tiny_model())
    with sampling(fake, timeout=0.4, patience=0.5) as engine:
        fake.hook = lambda path, body: time.sleep(1.0)
        engine.submit(request())
        with pytest.raises(TurntreeError, match="no server answered"):
            engine.poll()


def test_an_error_of_one_request_is_a_fault_of_its_own():
    fake = FakeVllm(tiny_model())
    with sampling(fake) as engine:
        fake.hook = lambda path, body: 500 if body.get("prompt") == [1, 2] else None
        bad, good = engine.submit(request(prompt=(1, 2))), engine.submit(request())
        ends = {}
        while engine.in_flight:
            ends |= {end.ticket: end for end in engine.poll()}
        assert "500" in ends[bad].fault and ends[good].completion is not None


def test_a_server_that_is_not_there_is_named_before_anything_is_sampled():
    with running(FakeVllm(tiny_model())) as url:
        pass
    with pytest.raises(InputError, match=r"no vLLM server answers .*turntree serve"):
        VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP})


# requests


def test_every_setting_that_a_model_folder_could_change_is_sent():
    fake = FakeVllm(tiny_model())
    with sampling(fake) as engine:
        engine.generate([request(temperature=0.0)])
    body = fake.of("/v1/completions")[-1]
    said = {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")}
    assert said == {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert body["prompt"] == list(PROMPT) and body["stop_token_ids"] == [STOP]


def test_no_more_requests_are_open_at_a_server_than_it_may_have():
    fake, now, most = FakeVllm(tiny_model()), [0], [0]
    with sampling(fake, concurrency=3) as engine:

        def count(path, body):
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.02)
            now[0] -= 1

        fake.hook = count
        engine.generate([request(seed) for seed in range(12)])
    assert 1 < most[0] <= 3


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "localhost:1"},
        {"url": "http://a,http://a/"},
        {"timeout": 0.0},
        {"concurrency": 0},
        {"max_context": 0},
        {"tolerance": -1.0},
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        VllmConfig(**{"url": "http://a", **bad})


# routing


def servers(count):
    return [Server(f"http://host{number}", concurrency=1, timeout=1.0) for number in range(count)]


def test_siblings_and_later_turns_go_where_their_prompt_is():
    all_of_them = servers(3)
    router = Router()
    home = {}
    for task in range(6):
        prompt = tuple(range(100 * task, 100 * task + 64))
        home[task] = router.choose(prompt, all_of_them)
        assert {router.choose(prompt, all_of_them) for _ in range(3)} == {home[task]}
        assert router.choose((*prompt, *range(7000, 7040)), all_of_them) is home[task], "its next turn"
    assert set(home.values()) == set(all_of_them), "tasks are spread"


def test_a_common_beginning_does_not_send_everything_to_one_server():
    all_of_them = servers(2)
    router = Router()
    system = tuple(range(32))
    found = [router.choose((*system, *range(1000 * task, 1000 * task + 64)), all_of_them) for task in range(8)]
    assert found.count(all_of_them[0]) == found.count(all_of_them[1]) == 4


def test_a_busy_server_is_passed_over():
    all_of_them = servers(2)
    router = Router()
    prompt = tuple(range(64))
    found = [router.choose(prompt, all_of_them) for _ in range(40)]
    assert 8 <= found.count(found[0]) < 40
    assert min(router.open[server] for server in all_of_them) >= 10


# engines of workers


@contextlib.contextmanager
def following(fake, model):
    """The engine that trains, over one server, and that of a worker."""
    with running(fake) as url:
        config = VllmConfig(url=url, patience=5.0)
        with (
            VllmEngine(config, model, TOKENIZER, {STOP}) as engine,
            VllmFollower(config, TOKENIZER, {STOP}) as worker,
        ):
            yield engine, worker


@pytest.mark.parametrize("adapter", [False, True])
def test_a_worker_samples_from_what_servers_were_sent_and_holds_no_weights(adapter):
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    if adapter:
        add_adapter(policy, LoRAConfig(rank=2))
    with following(fake, policy) as (engine, worker):
        for version in (1, 2):
            engine.update_weights(stirred(policy, version), version)
            sent = len([path for path, _ in fake.asked if path != "/v1/completions"])
            worker.update_weights(engine.served(), engine.policy_version)
            assert len([path for path, _ in fake.asked if path != "/v1/completions"]) == sent, "it sends none itself"
            (found,) = worker.generate([request(version)])
            assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)
            assert found.policy_version == version
            assert engine.generate([request(version)])[0].token_ids == found.token_ids


def test_a_worker_may_sample_from_a_version_that_is_kept_and_from_no_other():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    add_adapter(policy, LoRAConfig(rank=2))
    with following(fake, policy) as (engine, worker):
        engine.keep(2)
        told = []
        for version in (1, 2, 3):
            engine.update_weights(stirred(policy, version), version)
            told.append((engine.served(), engine.generate([request()])[0].logprobs))
        assert len(fake.adapters) == 2
        for served, logprobs in told[1:]:
            worker.update_weights(served, served.version)
            assert worker.generate([request()])[0].logprobs == pytest.approx(logprobs, abs=1e-5)
        with pytest.raises(InputError):  # its folder is gone
            worker.update_weights(told[0][0], 1)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_server_that_was_started_again_gets_its_weights_from_a_worker(adapter):
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    if adapter:
        add_adapter(policy, LoRAConfig(rank=2))
    with following(fake, policy) as (engine, worker):
        engine.update_weights(stirred(policy), 1)
        worker.update_weights(engine.served(), engine.policy_version)
        fake.boot = "2"
        if adapter:
            fake.adapters.clear()
        else:
            fake.start_with(tiny_model().state_dict())
        (found,) = worker.generate([request()])
        assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)


def test_a_worker_refuses_a_server_of_other_weights():
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    with following(fake, policy) as (engine, worker):
        engine.update_weights(stirred(policy), 1)
        fake.dev = False  # it takes no weights
        stirred(fake.model, seed=5)
        with pytest.raises(InputError):
            worker.update_weights(engine.served(), engine.policy_version)
        fake.dev = True
        fake.hook = lambda path, body: 200 if path == "/collective_rpc" else None  # it says that it took them
        with pytest.raises(TurntreeError, match="other weights"):
            worker.update_weights(engine.served(), engine.policy_version)


def test_workers_that_find_the_same_server_without_its_weights_do_not_end_each_other():
    """The second one cannot empty the cache of a server that the first samples from again."""
    policy, fake = tiny_model(), FakeVllm(tiny_model())
    with following(fake, policy) as (engine, worker):
        engine.update_weights(stirred(policy), 1)
        fake.start_with(tiny_model().state_dict())
        fake.busy = True
        worker.update_weights(engine.served(), 1)
        assert worker.generate([request()])[0].logprobs == engine.generate([request()])[0].logprobs


def test_a_worker_begins_while_a_server_is_away():
    policy, here, away = tiny_model(), FakeVllm(tiny_model()), FakeVllm(tiny_model())
    with running(here) as first, running(away) as second:
        config = VllmConfig(url=f"{first},{second}", patience=5.0)
        with VllmEngine(config, policy, TOKENIZER, {STOP}) as engine:
            engine.update_weights(stirred(policy), 1)
            away.hook = lambda path, body: "drop"
            away.away = True
            with VllmFollower(config, TOKENIZER, {STOP}) as worker:
                worker.update_weights(engine.served(), 1)
                asked = len(away.asked)
                (found,) = worker.generate([request()])
                assert found.logprobs == pytest.approx(expected(policy, found), abs=1e-4)
                away.hook, away.away = lambda path, body: None, False
                until = time.monotonic() + 60
                while not worker._servers[1].up and time.monotonic() < until:
                    time.sleep(0.02)
                assert worker._servers[1].up and len(away.asked) > asked


def test_a_row_of_the_model_that_the_tokenizer_lacks_may_be_drawn() -> None:
    """Embeddings are often padded; the tokenizer is not another model's for that."""
    model = tiny_model(vocab_size=VOCAB_SIZE + 16)
    with running(FakeVllm(model)) as url, VllmEngine(VllmConfig(url=url), model, tiny_tokenizer(), {STOP}) as engine:
        asked = [GenerationRequest(prompt_ids=(1, 20, 30), sampling=Sampling(max_tokens=8), seed=k) for k in range(40)]
        drawn = {token for completion in engine.generate(asked) for token in completion.token_ids}
        assert max(drawn) >= VOCAB_SIZE
        again = GenerationRequest(prompt_ids=(1, max(drawn)), sampling=Sampling(max_tokens=2), seed=0)
        assert engine.generate([again])[0].token_ids
