"""The scripted engine says what it is told, and refuses scripts that no model could have said."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plain_model import ask

from turntree.core.errors import InputError
from turntree.engines.scripted import ScriptedAnswer, ScriptedEngine


def test_scripts_answer_by_prompt_and_seed() -> None:
    engine = ScriptedEngine.from_scripts({(1, 2): [(5, 0), (6, 7, 0)], (3,): [(8, 0)]}, [0], vocab_size=10)
    answers = engine.generate([ask((1, 2), 0), ask((1, 2), 1), ask((1, 2), 2), ask((3,), 9)])
    assert [answer.token_ids for answer in answers] == [(5, 0), (6, 7, 0), (5, 0), (8, 0)]


def test_an_unscripted_prompt_or_an_answer_without_an_end_is_an_error() -> None:
    engine = ScriptedEngine.from_scripts({(1,): [(5, 6)]}, [0], vocab_size=10)
    with pytest.raises(InputError, match=r"no script answers the prompt \(2,\); add it"):
        engine.generate([ask((2,))])
    with pytest.raises(InputError, match="answers 2 tokens without a stop token, 6 were to be sampled"):
        engine.generate([ask((1,))])


def test_an_answer_is_cut_at_its_stop_token_or_limit() -> None:
    engine = ScriptedEngine(lambda prompt, seed: (5, 6, 0, 7), [0], vocab_size=10)
    stopped, cut = engine.generate([ask((1,)), ask((1,), max_tokens=2)])
    assert (stopped.token_ids, stopped.finish) == ((5, 6, 0), "stop")
    assert (cut.token_ids, cut.finish) == ((5, 6), "length")


def test_statistics_may_be_scripted() -> None:
    answer = ScriptedAnswer((5, 0), logprobs=(-0.5, -0.25), entropies=(1.0, 0.5))
    (completion,) = ScriptedEngine(lambda prompt, seed: answer, [0], vocab_size=10).generate([ask((1,))])
    assert completion.logprobs == (-0.5, -0.25)
    assert completion.entropies == (1.0, 0.5)


def test_it_works_without_loading_torch() -> None:
    code = "import sys, turntree.engines.scripted; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
