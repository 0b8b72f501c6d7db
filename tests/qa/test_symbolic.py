"""Expressions are compared within limits of time and memory, from any thread, and again after the worker was killed."""

import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from turntree.core.errors import TurntreeError
from turntree.verify.workers import Workers
from turntree_worlds.qa import symbolic

HOSTILE = ["9^{9^{9}}", "10000000!", r"\sum_{n=1}^{100000000} n^n", r"\prod_{n=1}^{9999999} n"]


@pytest.fixture(scope="module")
def worker():
    return Workers("turntree_worlds.qa.symbolic_worker:answer", count=2)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_cannot_be_computed_in_time_is_given_up_and_the_next_question_is_answered(worker, hostile):
    assert worker.ask(("x+x", "2x"), 60) is True
    started = time.perf_counter()
    assert worker.ask((hostile, "1"), 0.3) in (None, False)
    assert time.perf_counter() - started < 10
    assert worker.ask(("x+x", "2x"), 60) is True


def test_long_texts_are_not_even_tried_and_deep_ones_are_given_up(monkeypatch):
    monkeypatch.setattr(symbolic, "SECONDS", 0.3)
    assert symbolic.equal("1+" * 300 + "1", "301") is None
    assert symbolic.equal("(" * 150 + "1" + ")" * 150, "x") in (None, False)
    assert not symbolic.readable("1+" * 300 + "1")


def test_questions_from_many_threads_get_their_own_answers(worker):
    def ask(k):
        return worker.ask((f"{k}x+x", f"{k + 1}x"), 60), worker.ask((f"{k}x", f"{k + 1}x"), 60)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(2, 26))) == [(True, False)] * 24


def test_the_order_of_the_two_makes_no_difference_and_what_cannot_be_read_equals_nothing():
    assert symbolic.equal("x^2-1", "(x-1)(x+1)") is True is symbolic.equal("(x-1)(x+1)", "x^2-1")
    assert symbolic.equal(r"\frac{", "1") is False is symbolic.equal("1", r"\frac{")
    assert symbolic.equal("x\n+1", "1\n+\nx") is True


def test_both_orders_are_one_question(monkeypatch):
    asked = []
    monkeypatch.setattr(symbolic._workers, "ask", lambda texts, seconds: bool(asked.append(texts)))
    symbolic.equal("b + a", "a + c")
    symbolic.equal("a + c", "b + a")
    assert asked == [("a + c", "b + a")]


def test_what_was_not_decided_in_time_is_asked_again_and_not_kept(monkeypatch):
    answers = iter([None, True])
    monkeypatch.setattr(symbolic._workers, "ask", lambda texts, seconds: next(answers))
    assert [symbolic.equal("n! + m", "m! + n") for _ in range(3)] == [None, True, True]


def test_text_is_never_run_as_python(worker, tmp_path):
    """sympy's own reader of plain text evaluates it; the one used here does not."""
    for text in (f"open('{tmp_path}/a','w')", f"__import__('os').mkdir('{tmp_path}/b')"):
        assert worker.ask((text, "1"), 60) is None and symbolic.equal(text, "1") is not True
    assert list(tmp_path.iterdir()) == []


def test_a_fork_asks_a_worker_of_its_own():
    assert symbolic.equal("x+x", "2x") is True
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # exits without running the parent's handlers
        fresh = not symbolic._workers._idle
        os.write(write, b"y" if fresh and symbolic.equal("y+y", "2y") is True else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
    assert symbolic.equal("z+z", "2z") is True


def test_without_the_extra_the_error_names_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("latex2") else find(name))
    with pytest.raises(TurntreeError, match=r"pip install 'turntree\[math\]'"):
        symbolic.readable("x + 7y")


def test_a_worker_that_died_is_replaced_and_asked_again():
    one = Workers("turntree_worlds.qa.symbolic_worker:answer", count=1)
    assert one.ask(("x+x", "2x"), 60) is True
    (process,) = one._idle
    process.kill()
    process.wait()
    assert one.ask(("x+x", "2x"), 60) is True


def test_an_undecided_comparison_keeps_no_other_waiting(worker):
    assert worker.ask(("x+x", "2x"), 60) is True
    with ThreadPoolExecutor(1) as threads:
        undecided = threads.submit(worker.ask, (r"\sum_{n=1}^{100000000} n^n", "1"), 3)
        time.sleep(0.2)
        assert worker.ask(("y+y", "2y"), 60) is True
        assert not undecided.done()
        assert undecided.result(60) is None


def test_descriptors_above_1023_are_no_answer_of_the_worker(worker):
    """`select` refuses them, and a verifier would take its error for wrong arguments."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert Workers("turntree_worlds.qa.symbolic_worker:answer", count=1).ask(["1+1", "2"], 5.0) == worker.ask(
            ["1+1", "2"], 5.0
        )
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
