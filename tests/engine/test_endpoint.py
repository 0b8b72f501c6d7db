"""The endpoint engine against a server on this machine: token ids in, token ids out, faults that are faults."""

import asyncio
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from completions_server import completion, serve
from tiny_models import tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine.answers import entropy_bounds
from turntree.engine.endpoint import EndpointEngine
from turntree.engine.limits import EndpointConfig

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.eos_token_id
LN2 = math.log(2)


def engine(server, **settings):
    config = EndpointConfig(url=server.url, tokenizer="unused", **{"max_context": 64, "retries": 0, **settings})
    return EndpointEngine(config, "served", TOKENIZER, {STOP})


def request(seed=0, prompt=(5, 6, 7), **sampling):
    return GenerationRequest(prompt_ids=prompt, sampling=Sampling(**{"max_tokens": 8, **sampling}), seed=seed)


def logprobs(names, values, top=None):
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": []}


def test_the_prompt_goes_out_and_the_answer_comes_back_in_token_ids():
    top = [{"a": -LN2, "b": -LN2}, {"a": 0.0}]
    answer = completion("ab", logprobs(["x", "y"], [-LN2, 0.0], top), token_ids=[40, STOP])
    with serve(lambda asked: answer) as server, engine(server) as remote:
        (found,) = remote.generate([request(seed=2**40 + 3, temperature=0.7)])
    assert (found.token_ids, found.finish) == ((40, STOP), "stop")
    assert found.logprobs == (-LN2, 0.0)
    assert found.entropies == pytest.approx((LN2, 0.0))
    assert remote.exact
    (asked,) = server.asked
    assert asked["path"] == "/v1/completions"
    assert (asked["prompt"], asked["max_tokens"], asked["temperature"]) == ([5, 6, 7], 8, 0.7)
    assert (asked["seed"], asked["stop_token_ids"], asked["model"]) == (3, [STOP], "served")
    assert (found.cost.turns, found.cost.prefilled_tokens, found.cost.decoded_tokens) == (1, 3, 2)


def test_what_the_servers_model_would_set_by_itself_is_set():
    """vLLM takes what a request leaves out from the model's generation_config.json (of Qwen2.5: top_k 20)."""
    answer = completion("", None, token_ids=[STOP])
    with serve(lambda asked: answer) as server, engine(server) as remote:
        remote.generate([request()])
    said = {name: server.asked[0][name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    assert said == {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def test_token_names_are_read_as_ids():
    answer = completion("", logprobs(["token_id:40", "token_id:41"], [-1.0, -2.0]), "length")
    with serve(lambda asked: answer) as server, engine(server) as remote:
        (found,) = remote.generate([request(max_tokens=2)])
    assert (found.token_ids, found.finish, found.logprobs) == ((40, 41), "length", (-1.0, -2.0))
    assert remote.exact
    assert found.entropies[0] == pytest.approx(math.log(len(TOKENIZER)) / 2)


def test_a_server_that_returns_text_only_is_read_and_called_inexact():
    with serve(lambda asked: completion("go to the drawer 1")) as server, engine(server, max_context=256) as remote:
        (found,) = remote.generate([request()])
    assert found.token_ids == (*TOKENIZER.encode("go to the drawer 1"), STOP)
    assert not remote.exact
    assert set(found.logprobs) == {0.0}


def test_another_trainer_says_when_its_weights_are_on_the_server_which_must_then_report_all_tokens():
    answers = [completion("ab", logprobs(["x"], [-LN2]), token_ids=[STOP]), completion("go to the drawer 1")]
    with serve(lambda asked: answers.pop(0)) as server, engine(server, max_context=256) as remote:
        remote.update_weights(None, 3)
        (found,) = remote.generate([request()])
        assert (found.policy_version, found.logprobs) == (3, (-LN2,))
        with pytest.raises(InputError):
            remote.generate([request()])


def test_what_follows_a_stop_token_is_not_part_of_the_answer():
    answer = completion("", None, "length", token_ids=[40, STOP, 41, 42])
    with serve(lambda asked: answer) as server, engine(server) as remote:
        (found,) = remote.generate([request()])
    assert (found.token_ids, found.finish) == ((40, STOP), "stop")


def test_answers_are_polled_once_each_whatever_order_they_come_in():
    def slow_first(asked):
        time.sleep(0.2 if asked["prompt"] == [1] else 0.0)
        return completion("", None, token_ids=[asked["prompt"][0] + 20, STOP])

    with serve(slow_first) as server, engine(server, concurrency=4) as remote:
        tickets = [remote.submit(request(prompt=(k,))) for k in range(1, 9)]
        found = []
        while remote.in_flight:
            found += remote.poll()
        assert remote.poll() == []
    assert sorted(done.ticket for done in found) == tickets
    assert found[-1].ticket == tickets[0]
    assert all(done.completion.token_ids[0] == done.ticket - tickets[0] + 21 for done in found)
    assert 1 < server.busiest <= 4


def test_the_wait_for_the_server_is_on_the_bill_however_it_is_asked():
    def slow(asked):
        time.sleep(0.2)
        return completion("", None, token_ids=[40, STOP])

    with serve(slow) as server, engine(server, concurrency=4) as remote:
        together = remote.generate([request() for _ in range(4)])
    assert 0.2 <= sum(found.cost.engine_seconds for found in together) < 0.8, "shared by those that it was for"


def test_a_cancelled_request_is_never_returned():
    def answer(asked):
        time.sleep(0.1)
        return completion("", None, token_ids=[40, STOP])

    with serve(answer) as server, engine(server, concurrency=1) as remote:
        first, second = remote.submit(request()), remote.submit(request())
        remote.cancel(first)
        assert remote.in_flight == 1
        assert [done.ticket for done in remote.poll()] == [second]


def test_a_request_that_fails_is_a_fault_of_its_own():
    def answer(asked):
        return 500 if asked["prompt"] == [1] else completion("", None, token_ids=[40, STOP])

    with serve(answer) as server, engine(server) as remote:
        bad, good = remote.submit(request(prompt=(1,))), remote.submit(request(prompt=(2,)))
        found = {}
        while remote.in_flight:
            found.update((done.ticket, done) for done in remote.poll())
        assert found[good].fault is None
        assert "500" in found[bad].fault and "\n" not in found[bad].fault
        with pytest.raises(TurntreeError, match=r"127\.0\.0\.1.*500"):
            remote.generate([request(prompt=(2,)), request(prompt=(1,))])


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, {"error": {"message": "Incorrect API key provided"}}, "Incorrect API key provided.*OPENAI_API_KEY"),
        (404, {"error": {"message": "The model `x` does not exist."}}, "The model `x` does not exist.*--model"),
        (422, {"detail": [{"loc": ["body", "prompt"], "msg": "should be a string"}]}, "should be a string.*token ids"),
    ],
)
def test_what_the_server_will_never_take_ends_the_run_at_once_in_its_own_words(status, body, said):
    with serve(lambda asked: (status, body)) as server, engine(server, retries=3) as remote:
        with pytest.raises(InputError, match=f"{status}.*{said}") as caught:
            remote.generate([request()])
        assert len(server.asked) == 1, "it is not tried again"
        for seed in range(3):
            remote.submit(request(seed))
        with pytest.raises(InputError, match=f"{status}"):
            remote.poll()
        assert remote.in_flight == 0
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_request_that_is_too_long_for_the_server_is_a_fault_in_its_words():
    told = {"error": {"message": "This model's maximum context length is 32 tokens."}}
    with serve(lambda asked: (400, told)) as server, engine(server, retries=3) as remote:
        remote.submit(request())
        (done,) = remote.poll()
    assert "400" in done.fault and "maximum context length is 32" in done.fault
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_a_fault_that_says_so():
    with serve(lambda asked: 500) as server:
        pass
    with engine(server) as remote:
        remote.submit(request())
        (done,) = remote.poll()
    assert "Connection error. (ConnectError: All connection attempts failed)" in done.fault


def test_a_failure_is_tried_again_and_only_so_often():
    failures = {"left": 1}

    def flaky(asked):
        failures["left"] -= 1
        return 503 if failures["left"] >= 0 else completion("", None, token_ids=[40, STOP])

    with serve(flaky) as server, engine(server, retries=1) as remote:
        assert remote.generate([request()])[0].token_ids == (40, STOP)
        assert len(server.asked) == 2


def test_a_server_that_does_not_answer_in_time_is_a_fault():
    def asleep(asked):
        time.sleep(0.5)
        return completion("")

    with serve(asleep) as server, engine(server, timeout=0.1) as remote:
        remote.submit(request())
        (done,) = remote.poll()
    assert "no whole answer" in done.fault or "timed out" in done.fault


def test_a_server_that_answers_drop_by_drop_is_a_fault_too(monkeypatch):
    """Its every byte came in time, and the request never ended."""

    async def dripping(self, path, **_):
        while True:
            await asyncio.sleep(0.01)

    monkeypatch.setattr("openai.AsyncOpenAI.post", dripping)
    with serve(lambda asked: completion("")) as server, engine(server, timeout=0.1) as remote:
        remote.submit(request())
        (done,) = remote.poll(30)
    assert "no whole answer in 0.1 s" in done.fault


def test_an_ending_without_a_name_is_a_fault():
    with serve(lambda asked: completion("x", None, "content_filter")) as server, engine(server) as remote:
        remote.submit(request())
        assert "content_filter" in remote.poll()[0].fault


@pytest.mark.parametrize("values", [[math.nan, 0.0], [-math.inf, 0.0]])
def test_a_log_probability_that_is_no_number_is_a_fault_and_not_certainty(values):
    answer = completion("ab", logprobs(["x", "y"], values), token_ids=[40, STOP])
    with serve(lambda asked: answer) as server, engine(server) as remote:
        remote.submit(request())
        assert "finite number" in remote.poll()[0].fault


def test_an_answer_that_is_no_completion_says_so():
    with serve(lambda asked: (200, ["hello"])) as server, engine(server) as remote:
        remote.submit(request())
        assert "not a completions API" in remote.poll()[0].fault


def test_an_empty_key_is_no_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with serve(lambda asked: completion("", None, token_ids=[40, STOP])) as server, engine(server) as remote:
        (found,) = remote.generate([request()])
    assert found.token_ids == (40, STOP)


@pytest.mark.parametrize("told", [{"max_position_embeddings": 96}, {"text_config": {"max_position_embeddings": 96}}])
def test_the_context_is_what_the_config_beside_the_tokenizer_says(tmp_path, monkeypatch, told):
    monkeypatch.setattr(TOKENIZER, "model_max_length", 10**30)
    (tmp_path / "config.json").write_text(json.dumps(told))
    config = EndpointConfig(url="http://127.0.0.1:9/v1", tokenizer=str(tmp_path))
    with EndpointEngine(config, "served", TOKENIZER, {STOP}) as remote:
        assert remote.max_context == 96
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": None}))
    with pytest.raises(ConfigError, match="how long the context is"):
        EndpointEngine(config, "served", TOKENIZER, {STOP})


def test_requests_that_no_engine_takes_are_refused_before_they_are_sent():
    with serve(lambda asked: completion("")) as server, engine(server) as remote:
        with pytest.raises(InputError, match="the context holds 64"):
            remote.submit(request(prompt=(5,) * 64))
        assert server.asked == []


def test_ids_may_have_gaps():
    """Phi-4-mini's turns end with token 200,020 of some 200,010; a prompt with one was refused."""
    row = json.loads(TOKENIZER.backend_tokenizer.to_str())
    beyond = row["model"]["vocab"]["<|end|>"] = len(TOKENIZER) + 500
    next(token for token in row["added_tokens"] if token["content"] == "<|end|>")["id"] = beyond
    gaps = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(row)), eos_token="<|end|>")
    with serve(lambda asked: completion("", None, token_ids=[40, beyond])) as server:
        config = EndpointConfig(url=server.url, tokenizer="unused", max_context=64)
        with EndpointEngine(config, "served", gaps, {beyond}) as remote:
            (found,) = remote.generate([request(prompt=(5, beyond, 7))])
            assert found.token_ids == (40, beyond)
            with pytest.raises(InputError, match=f"outside 0..{beyond}"):
                remote.submit(request(prompt=(beyond + 1,)))


@pytest.mark.parametrize("bad", [{"url": "localhost:80"}, {"timeout": 0.0}, {"concurrency": 0}, {"max_context": -1}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        EndpointConfig(**{"url": "http://x/v1", "tokenizer": "t", **bad})


@given(st.lists(st.floats(0.001, 1.0), min_size=3, max_size=40), st.integers(1, 40))
def test_the_entropy_lies_within_its_bounds(weights, count):
    total = math.fsum(weights)
    probabilities = sorted((w / total for w in weights), reverse=True)
    entropy = -math.fsum(p * math.log(p) for p in probabilities)
    low, high = entropy_bounds([math.log(p) for p in probabilities[:count]], len(weights))
    assert low - 1e-6 <= entropy <= high + 1e-6
    if count >= len(weights):
        assert high - low < 1e-6
