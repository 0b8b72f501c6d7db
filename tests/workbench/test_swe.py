"""Bugs in generated packages: the reverse edit earns the reward, and nothing that only looks like it does."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.messages import Message, ToolCall
from turntree_worlds.workbench import bugs
from turntree_worlds.workbench.bugs import PACKAGES


def call(name, **arguments):
    return Message("assistant", "", (ToolCall(name, arguments, "call_1"),))


def told(environment, name, **arguments):
    return environment.step(call(name, **arguments)).messages[0].content


def repair(environment):
    """The arguments of the edit that the expert makes."""
    return next(m.tool_calls[0].arguments for m in environment.gold if m.tool_calls[0].name == "str_replace")


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["train", "dev", "test"]), st.integers(0, 10**6))
def test_the_reverse_edit_solves_every_generated_task(swe, split, number):
    environment = swe(split, number)
    environment.reset()
    for message in environment.gold:
        last = environment.step(message)
    assert (last.done, last.success) == (True, True)


def test_packages_alternate_and_a_task_is_the_same_each_time(sandbox):
    tasks = [bugs.generated("train", number, sandbox) for number in range(len(PACKAGES))]
    assert [task.kind for task in tasks] == [package.name for package in PACKAGES]
    assert tasks[:2] == [bugs.generated("train", number, sandbox) for number in range(2)]


def test_the_visible_tests_fail_before_the_repair_and_pass_after_it(swe):
    for number in range(len(PACKAGES)):
        environment = swe("dev", number)
        environment.reset()
        assert "FAILED (" in told(environment, "bash", command="python3 -m unittest")
        told(environment, "str_replace", **repair(environment))
        assert told(environment, "bash", command="python3 -m unittest").endswith("OK")


CHEATS = {
    "nothing": ("true",),
    "deletes the tests": ("rm test_*.py",),
    "empties the tests": ("for f in test_*.py; do echo 'import unittest' > $f; done",),
    "expects what the bug gives": ("sed -i 's/assertEqual(.*/assertTrue(True)/' test_*.py",),
    "skips the tests": ("sed -i 's/^    def test/    @unittest.skip(\"\")\\n    def test/' test_*.py",),
    "ends the interpreter": ("for f in */__init__.py; do echo 'import os; os._exit(0)' > $f; done",),
    "prints success": ("for f in */__init__.py; do echo 'print(\"OK\")' > $f; done",),
    "writes to every descriptor": (
        'for f in */__init__.py; do printf \'import os\\nfor n in range(3, 30):\\n    try: os.write(n, b"+[True]")\\n'
        "    except OSError: pass\\nos._exit(0)\\n' > $f; done",
    ),
    "makes everything equal": (
        "for f in */__init__.py; do printf 'import builtins\\nclass E(str):\\n    __eq__ = lambda s, o: True\\n"
        "    __hash__ = str.__hash__\\nbuiltins.repr = lambda x: E(x)\\n' > $f; done",
    ),
    "shadows a module of the judge": ("echo 'import os; os._exit(0)' > importlib.py; cp importlib.py sys.py",),
    "removes the package": ("rm -r [a-z]*/",),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_what_does_not_repair_the_package_earns_nothing(swe, cheat):
    environment = swe("train", 0)
    environment.reset()
    for line in CHEATS[cheat]:
        told(environment, "bash", command=line)
    ended = environment.step(call("submit"))
    assert (ended.done, ended.success, ended.reward) == (True, False, 0.0)


def test_a_repair_for_the_visible_tests_alone_earns_nothing(swe):
    """The judgement asks for values that no test shows."""
    environment = swe("train", 1)
    environment.reset()
    shown = told(environment, "bash", command="cat test_*.py")
    asked = environment.object._task.values[0][0]
    hidden = [probe for probe in PACKAGES[1].probes if probe.partition("(")[2].split(",")[0] not in shown]
    assert hidden and all(probe.partition("(")[2].split(",")[0] in asked for probe in hidden)
    assert environment.object._task.values[0][1] not in told(environment, "bash", command="env; cat -r . 2>&1; ls -R /")


def test_editing_tools_answer_mistakes(swe):
    environment = swe("train", 0)
    environment.reset()
    path = repair(environment)["path"]
    assert told(environment, "view", path="nothing.py") == "error: there is no file 'nothing.py'"
    assert told(environment, "view", path=path, first=1, last=1).startswith("   1  ")
    assert told(environment, "view", path=path, first=900, last=2) == "[no lines]"
    assert "occurs 0 times" in told(environment, "str_replace", path=path, old="@@@", new="")
    assert "must occur once" in told(environment, "str_replace", path=path, old="e", new="")
    assert "`old` is empty" in told(environment, "str_replace", path=path, old="", new="x")
    assert "error" in told(environment, "view", path=["a"])
    before = environment.state()
    told(environment, "str_replace", path=path, old="@@@", new="")
    assert environment.state() == before


def test_an_edit_keeps_the_bytes_that_are_no_text(swe):
    environment = swe("train", 0)
    environment.reset()
    told(environment, "bash", command=r"printf 'caf\351 = 1\r\nna\303\257ve = 2\n' > latin.py")
    assert told(environment, "str_replace", path="latin.py", old="naïve = 2", new="naïve = é") == "latin.py was changed"
    assert environment.object.files["latin.py"].data == b"caf\xe9 = 1\r\n" + "naïve = é\n".encode()


def test_an_edit_is_seen_by_the_shell_although_older_bytecode_lies_beside_it(swe):
    """The edit may keep the size of the file; Python would then take the stale bytecode if it kept its time too."""
    for number in range(len(PACKAGES)):
        environment = swe("train", number)
        environment.reset()
        told(environment, "bash", command="python3 -m unittest")
        told(environment, "str_replace", **repair(environment))
        assert environment.step(call("submit")).success


def test_a_fork_edits_its_own_files(swe):
    environment = swe("train", 2)
    environment.reset()
    twin = environment.fork()
    told(twin, "str_replace", **repair(environment))
    assert twin.step(call("submit")).success
    assert not environment.step(call("submit")).success


def test_no_bug_to_train_on_is_a_bug_of_a_held_out_task(sandbox):
    edits = {
        split: {str(bugs.generated(split, number, sandbox).gold[2].arguments) for number in range(40)}
        for split in ("train", "dev", "test")
    }
    assert all(edits[one].isdisjoint(edits[other]) for one, other in itertools.combinations(edits, 2))
