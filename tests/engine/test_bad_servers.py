"""Servers that answer something else than one completion: what they say is read rightly, or it is a named fault."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import math
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from completions_server import completion, sends, serve
from fake_vllm import FakeVllm, running
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine.answers import AnswerReader, Unusable, answer_of
from turntree.engine.endpoint import EndpointEngine, Server
from turntree.engine.limits import EndpointConfig, VllmConfig
from turntree.engine.vllm import VllmEngine
from turntree.run import received

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.eos_token_id
PROMPT = tuple(range(10, 22))
IDS = [40, 41, STOP]
SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "running" / "c20_endpoint" / "bad_server.py"


def request(seed: int = 0, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens), seed=seed)


def answer(
    ids: Any = IDS, values: Any = "right", tops: Any = "right", reason: Any = "stop", **more: Any
) -> dict[str, Any]:
    """A right answer, or one with other parts."""
    values = [-0.1] * len(ids) if values == "right" else values
    tops = [{"token_id:7": -0.1}] * len(ids) if tops == "right" else tops
    logprobs = {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": values, "top_logprobs": tops}
    choice = {"logprobs": logprobs, "token_ids": ids, **more.pop("choice", {})}
    made = completion("ab", choice.pop("logprobs"), reason, **choice)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids), "prompt_tokens_details": None}
    return {**made, "model": "served", "usage": usage, **more}


def ended(said: Any, capsys: Any = None, **config: Any) -> Completion | str:
    """What an engine makes of an answer: a completion, or one line that says why there is none."""
    url = config.pop("url", None)
    with serve(lambda asked: said) as server:
        settings_ = {"max_context": 128, "retries": 0, "timeout": 5.0, **config}
        own = EndpointConfig(url=url or server.url, tokenizer="unused", **settings_)
        with EndpointEngine(own, "served", TOKENIZER, {STOP}) as engine:
            return of(engine, request())


def of(engine: Any, asked: GenerationRequest) -> Completion | str:
    engine.submit(asked)
    try:
        (done,) = engine.poll(60)
    except (InputError, TurntreeError) as error:
        assert engine.in_flight == 0
        return one_clear_line(str(error))
    return done.completion if done.completion is not None else one_clear_line(done.fault)


def one_clear_line(text: str | None) -> str:
    assert text and "\n" not in text and len(text) < 600
    raw = (
        r"Traceback|RecursionError|KeyError|TypeError|IndexError|AttributeError|ValueError|AssertionError|object at 0x"
    )
    assert not re.search(raw, text), text
    return text


def valid(found: Completion, asked: GenerationRequest, vocabulary: int, stops: set[int]) -> None:
    """All that training believes of a completion."""
    count = len(found.token_ids)
    assert 0 < count == len(found.logprobs) == len(found.entropies)
    assert all(type(one) is int and one >= 0 for one in found.token_ids)
    assert all(math.isfinite(one) and -9999 < one <= 0 for one in found.logprobs)
    assert all(math.isfinite(one) and 0 <= one <= math.log(vocabulary) + 1e-9 for one in found.entropies)
    assert (found.finish == "stop") == (found.token_ids[-1] in stops)
    assert not stops & set(found.token_ids[:-1])
    assert found.cost.decoded_tokens == count and 0 <= found.cost.prefilled_tokens <= len(asked.prompt_ids)


RIGHT = {
    "as it must be": answer(),
    "a stop token kept back": answer([40, 41], usage={"completion_tokens": 3}),
    "tokens behind the stop": answer([40, STOP, 41]),
    "no usage": answer(usage=None),
    "no likeliest tokens": answer(tops=None),
    "rounding above 0": answer(values=[1e-7, -0.1, 0.0]),
    "likeliest tokens that could not be drawn": answer(tops=[{"token_id:7": -9999.0}, {}, None]),
    "whole numbers": answer(values=[-1, 0, -2]),
    "the prompt as it was sent": answer(choice={"prompt_token_ids": list(PROMPT)}),
    "names alone": {
        "choices": [{"finish_reason": "stop", "logprobs": {"tokens": ["token_id:40"], "token_logprobs": [-1.0]}}]
    },
    "with blanks before it": sends(b"\n \n" + json.dumps(answer()).encode()),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_a_completion_is_read_as_one(what):
    found = ended(RIGHT[what])
    assert isinstance(found, Completion), found
    valid(found, request(), len(TOKENIZER), {STOP})
    assert found.token_ids[0] == 40


WRONG: dict[str, tuple[Any, str]] = {
    "ids as text": (answer(choice={"token_ids": ["40", "41"]}), "token_ids.0"),
    "ids as whole floats": (answer(choice={"token_ids": [40.0, 41.0]}), "token_ids.0"),
    "ids as floats": (answer(choice={"token_ids": [40.5]}), "token_ids.0"),
    "ids as truths": (answer(choice={"token_ids": [True]}), "token_ids.0"),
    "a negative id": (answer([-1, 40]), "token_ids.0"),
    "a negative id alone": (answer(choice={"token_ids": [-1], "logprobs": None}), "token_ids.0"),
    "null as an id": (answer(choice={"token_ids": [None]}), "token_ids.0"),
    "ids as an object": (
        answer(choice={"token_ids": {"0": 40}}),
        "token_ids' of the answer should be a valid list",
    ),
    "ids beyond the vocabulary": (answer([40, 10**6]), "knows"),
    "other ids than names": (answer(choice={"token_ids": [40, 42, STOP]}), "other ids"),
    "a name that is no number": (answer(["x", 40]), "token_ids.0"),
    "no ids": (answer([], choice={"token_ids": []}, reason="length"), "sampled nothing"),
    "more than was asked for": (answer([40] * 17, reason="length"), "17 tokens, and 16"),
    "the prompt before the answer": (answer([*PROMPT, 40], usage=None), "echoes"),
    "a short prompt before the answer, counted": (
        answer([10, 40, STOP], usage={"completion_tokens": 1}),
        "3 tokens, and",
    ),
    "another prompt, counted": (answer(usage={"prompt_tokens": 7}), "another prompt"),
    "another prompt, shown": (answer(choice={"prompt_token_ids": [1, 2]}), "another prompt"),
    "a lost token": (answer(usage={"completion_tokens": 9}), "it sampled 9"),
    "NaN": (answer(values=[math.nan, -0.1, -0.1]), "token_logprobs.0' of the answer should be a finite number"),
    "minus infinity": (answer(values=[-math.inf, -0.1, -0.1]), "finite"),
    "infinity": (answer(values=[math.inf, -0.1, -0.1]), "finite"),
    "NaN among the likeliest": (answer(tops=[{"a": math.nan}] * 3), "finite"),
    "above 0": (answer(values=[0.5, -0.1, -0.1]), "token_logprobs.0' of the answer should be less than"),
    "above 0 among the likeliest": (
        answer(tops=[{"a": 2.0}] * 3),
        "top_logprobs.0.a' of the answer",
    ),
    "a token that could not be drawn": (answer(values=[-9999.0, -0.1, -0.1]), "probability 0"),
    "a probability as text": (answer(values=["-0.1"] * 3), "token_logprobs.0' of the answer should be a valid number"),
    "a truth as a probability": (answer(values=[False] * 3), "valid number"),
    "null as a probability": (answer(values=[None, -0.1, -0.1]), "valid number"),
    "too few probabilities": (answer(values=[-0.1]), "1 log-probabilities"),
    "too many probabilities": (answer(values=[-0.1] * 5), "5 log-probabilities"),
    "too few lists of the likeliest": (answer(tops=[{}]), "1 lists"),
    "likeliest tokens as a list": (answer(tops=[[1], [1], [1]]), "top_logprobs.0"),
    "probabilities as an object": (answer(values={"0": 1}), "token_logprobs"),
    "log-probabilities as a list": (answer(choice={"logprobs": [-0.1]}), "logprobs"),
    "no choices": (answer(choices=[]), "at least 1 item"),
    "null choices": (answer(choices=None), "choices"),
    "choices that are none": (answer(choices=[7]), "choices"),
    "two choices": (answer(choices=2 * answer()["choices"]), "at most 1 item"),
    "two choices in the wrong order": (
        answer(choices=[{**answer()["choices"][0], "index": index} for index in (1, 0)]),
        "choices",
    ),
    "the second choice": (answer(choice={"index": 1}), "choices.0.index"),
    "an end without a name": (answer(reason=None), "should be 'stop' or 'length', and is None"),
    "an end in a list": (answer(reason=["stop"]), "finish_reason"),
    "an abort": (answer(reason="abort"), "'abort'"),
    "a text that is none": ({"choices": [{"finish_reason": "stop", "text": {"a": 1}}]}, "choices.0.text"),
    "a usage that is none": (answer(usage=[1]), "usage"),
    "counts that are none": (answer(usage={"completion_tokens": "3"}), "usage.completion_tokens"),
    "an error under 200": ({"error": {"message": "model overloaded"}}, "model overloaded"),
    "an error beside choices": (answer(error={"message": "cut short"}), "cut short"),
    "a list": ((200, [1]), "not a completions API"),  # pyright: ignore[reportAssignmentType]
    "null": (sends(b"null"), "not a completions API"),
    "nothing": (sends(b""), "empty"),
    "no content": (sends(b"", 204), "empty"),
    "a page": (sends(b"<html>proxy\n login</html>"), "<html>proxy login"),
    "half of the JSON": (sends(b'{"choices": ['), "no complete JSON"),
    "another encoding": (sends(b'{"choices": "\xff\xfe"}'), "choices"),
    "deep": (sends(b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "deep under an error": (sends(b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 500), "500"),
    "thousands of digits": (sends(b'{"choices": ' + b"1" * 5000 + b"}"), "no complete JSON"),
    "packed": (sends(gzip.compress(json.dumps(answer()).encode()), content_encoding="gzip"), "packed"),
    "no compression": (sends(b"garbage", content_encoding="gzip"), "packed"),
    "less than it promised": (sends(b'{"id"', length=1000, hang_up=True), "Connection error"),
    "chunks that are none": (sends(b"zz\r\n{}\r\n", transfer_encoding="chunked", hang_up=True), "Connection error"),
    "another place": (sends(b"", 302, location="http://127.0.0.1:9/v1"), "127.0.0.1:9"),
    "another place for good": (sends(b"", 308, location="https://other.example/v1"), "other.example"),
    "a wrong key": ((401, {"error": {"message": "bad key"}}), "OPENAI_API_KEY"),
    "too large a request": ((413, {"error": {"message": "too large"}}), "too large"),
    "too many requests": (
        sends(b'{"error": "slow down"}', 429, retry_after="3600"),
        "slow down",
    ),
    "an error of the server": ((500, {"error": {"message": "boom"}}), "boom"),
    "an error in a page": (sends(b"<html>Bad Gateway</html>", 502), "502"),
    "an error whose words are none": ((500, {"error": {"message": {"a": [1]}}}), "500"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_completion_is_a_fault_that_names_it(what):
    said, word = WRONG[what]
    found = ended(said)
    assert isinstance(found, str) and word in found, found


def slow_head(handler: Any) -> None:
    """A line of headers now and then, each in time."""
    try:
        for number in range(100):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" if not number else b"x-%d: y\r\n" % number)
            time.sleep(0.05)
    except OSError:
        pass


def hangs_up(handler: Any) -> None:
    handler.close_connection = True


def packed(handler: Any) -> None:
    body = gzip.compress(b'{"choices": []}' + b" " * 10_000)
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_an_answer_that_unpacks_without_end_is_refused_before_it_is_unpacked():
    assert "packed" in one_clear_line(ended(packed))


def test_an_answer_longer_than_a_file_may_be_is_a_fault(monkeypatch):
    monkeypatch.setattr(received, "LONGEST", 10)
    assert "longer than 10 bytes" in one_clear_line(ended(answer()))


@pytest.mark.parametrize("act", [slow_head, hangs_up], ids=lambda act: act.__name__)
def test_a_server_that_never_comes_to_its_answer_is_a_fault(act):
    found = ended(act, timeout=0.2)
    assert isinstance(found, str) and ("no whole answer" in found or "Connection error" in found or "Timeout" in found)


def test_a_server_that_asks_to_wait_is_asked_again_after_that_and_no_sooner():
    with serve(lambda asked: sends(b"{}", 429, retry_after="1") if len(server.asked) < 2 else answer()) as server:
        config = EndpointConfig(url=server.url, tokenizer="unused", max_context=128, retries=1)
        began = time.monotonic()
        with EndpointEngine(config, "served", TOKENIZER, {STOP}) as engine:
            assert isinstance(of(engine, request()), Completion)
        assert len(server.asked) == 2 and time.monotonic() - began >= 1.0, (
            "a wait has a least time, whatever the machine"
        )


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (answer(model="another"), "'another'"),
        (completion("ab"), "no ids of tokens"),
        (answer(choice={"logprobs": None}), "log-probability of every token"),
    ],
)
def test_what_may_be_read_but_not_believed_is_said_once(said, word, capsys):
    with serve(lambda asked: said) as server:
        config = EndpointConfig(url=server.url, tokenizer="unused", max_context=128, retries=0)
        with EndpointEngine(config, "served", TOKENIZER, {STOP}) as engine:
            for seed in range(3):
                assert isinstance(of(engine, request(seed)), Completion)
    assert capsys.readouterr().err.count(word) == 1


# the shared cases

READ = {"ok", "503once"}  # the others are faults


@functools.cache
def household() -> Any:
    source = Path(__file__).parents[2] / "src"
    return AutoTokenizer.from_pretrained(source / "turntree_worlds" / "models" / "household_tiny")


KINDS = sorted(set(re.findall(r'k == "(\w+)"', SHARED.read_text()))) if SHARED.is_file() else []
KINDS = [kind for kind in KINDS if not kind.isupper()]


@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared cases beside the project")
@pytest.mark.parametrize("kind", KINDS)
def test_every_misbehaviour_of_the_shared_cases_is_read_or_named(kind, capsys):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SHARED), str(port), kind], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        config = EndpointConfig(
            url=f"http://127.0.0.1:{port}/v1", tokenizer="unused", max_context=4096, retries=2, timeout=2
        )
        stops = {household().eos_token_id}
        with EndpointEngine(config, "m", household(), stops) as engine:
            asked = request(prompt=tuple(range(20, 60)), max_tokens=32)
            found = of(engine, asked)
    finally:
        process.kill()
        process.wait()
    if kind in READ:
        assert isinstance(found, Completion), found
    if isinstance(found, Completion):
        assert kind in READ or "warning: " in capsys.readouterr().err, "neither right nor named"
        valid(found, asked, len(household()), stops)
        assert found.token_ids[:3] == (302, 310, 5)


# laws

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.sampled_from(["stop", "length", "token_id:40", "token_id:-1", "", "x"])
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


@st.composite
def answers(draw: Any) -> Any:
    """A right answer in which one to three values are replaced, left out or repeated; or any JSON."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    base = draw(st.sampled_from([name for name, said in RIGHT.items() if isinstance(said, dict)]))
    holder = {"body": copy.deepcopy(RIGHT[base])}
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from([("body", *place) for place in places(holder["body"])]))
        at: Any = holder
        for key in above:
            at = at[key]
        how = draw(st.sampled_from(["replace", "replace", "drop", "repeat"]))
        if how == "replace" or last == "body":
            at[last] = draw(JSON)
        elif how == "drop":
            del at[last]
        elif isinstance(at, list):
            at.insert(last, at[last])
    return holder["body"]


@settings(max_examples=500, deadline=None)
@given(answers())
def test_whatever_a_server_answers_is_a_valid_completion_or_a_named_fault(said):
    reader = AnswerReader(TOKENIZER, {STOP})
    try:
        body = answer_of(json.dumps(said))
        found = reader.read(request(), body, 0, 128)
        reader.check_vocabulary(found, "m")
    except (Unusable, ConfigError) as error:
        one_clear_line(str(error))
        return
    valid(found, request(), len(TOKENIZER), {STOP})
    assert not reader.exact or len(found.token_ids) <= request().sampling.max_tokens + 1
    given_ids = body.choice.token_ids
    assert given_ids is None or list(found.token_ids) in (given_ids[: len(found.token_ids)], [*given_ids, STOP])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_bytes_come_are_an_object_or_a_named_fault(data):
    try:
        answer_of(data.decode("utf-8", "replace"))
    except Unusable as error:
        one_clear_line(str(error))


# vLLM


@pytest.mark.parametrize("what", [name for name, (said, _) in WRONG.items() if isinstance(said, dict)])
def test_nothing_that_is_no_completion_is_trained_on_with_vllm_either(what, monkeypatch):
    """Neither behind a request, nor where the weights of the server are checked."""
    fake = FakeVllm(tiny_model())
    with running(fake) as url, VllmEngine(VllmConfig(url=url, patience=1.0), tiny_model(), TOKENIZER, {STOP}) as engine:
        said = {**WRONG[what][0], "system_fingerprint": "1"}
        said.pop("model", None)
        monkeypatch.setattr(fake, "_complete", lambda body: (200, said))
        assert isinstance(of(engine, request()), str)
        with pytest.raises(TurntreeError) as caught:
            engine.update_weights(tiny_model(), 1)
        one_clear_line(str(caught.value))


def test_an_answer_of_another_adapter_is_a_fault():
    fake = FakeVllm(tiny_model())
    with running(fake) as url, VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP}) as engine:
        complete = fake._complete
        fake._complete = lambda body: (200, {**complete(body)[1], "model": "base"})  # type: ignore[method-assign]
        assert "answers with 'base'" in str(of(engine, request()))


@pytest.mark.parametrize(
    "listed",
    [
        [],
        {},
        {"data": None},
        {"data": [7]},
        {"data": [{"id": 7}]},
        {"data": [{"id": "m", "max_model_len": "long"}]},
        "x",
    ],
)
def test_a_list_of_models_that_is_none_is_refused_in_one_line(listed, monkeypatch):
    fake = FakeVllm(tiny_model())
    monkeypatch.setattr(fake, "get", lambda path: (200, listed))
    with running(fake) as url, pytest.raises(InputError) as caught:
        VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP})
    assert "serve" in one_clear_line(str(caught.value))


def test_a_busy_server_is_asked_again():
    fake = FakeVllm(tiny_model())
    with running(fake) as url, VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP}) as engine:
        left = [429, 503]
        fake.hook = lambda path, body: left.pop() if left and body.get("max_tokens") == 16 else None
        assert isinstance(of(engine, request()), Completion) and not left


def test_a_server_takes_a_url_without_its_path():
    assert Server("http://host:1", concurrency=1, timeout=1.0).url == "http://host:1/v1"


def test_a_server_that_wants_another_key_is_told_by_the_name_of_the_variable(monkeypatch):
    fake = FakeVllm(tiny_model())
    monkeypatch.setattr(fake, "get", lambda path: (401, {"error": {"message": "this server needs its key"}}))
    with running(fake) as url, pytest.raises(InputError, match=r"401.*this server needs its key.*OPENAI_API_KEY"):
        VllmEngine(VllmConfig(url=url), tiny_model(), TOKENIZER, {STOP})


def test_an_answer_that_the_server_cut_by_a_limit_of_its_own_is_no_cut_turn(capsys: Any) -> None:
    """It would be a turn that the policy left unfinished, and so a failure of its own."""
    assert "limit of its own" in str(ended(answer([40, 41], reason="length"), capsys))
    full = answer([40] * 16, reason="length")
    assert isinstance(ended(full, capsys), Completion)
