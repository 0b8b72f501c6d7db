"""What `recommended` takes from the history: where the shell is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tree_sitter_bash")

from chat_import import import_chat
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.traces.candidates import candidates
from turntree.verify.recommended import Recommended, folder_in


def act(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, calls)


def call(name: str, **arguments: Any) -> Message:
    return act(ToolCall(name, arguments))


def bash(command: str) -> Message:
    return call("execute_bash", command=command)


def block(*lines: str) -> Message:
    return act(text="\n".join(["so", "```", *lines, "```"]))


def terminus(*keys: str) -> Message:
    commands = [{"keystrokes": k, "duration": 1.0} for k in keys]
    return act(text=json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": False}))


def reward(gold: Message, tried: Message, *, history: tuple[Message, ...] = (), **options: Any) -> Any:
    return Recommended(**options).judge(TurnState("t", 0, history, gold, ()), tried).reward


def done(message: Message, answer: str) -> tuple[Message, ...]:
    """A call that was made and answered. Ids come again in every turn, as some harnesses write them."""
    (made,) = message.tool_calls
    call = ToolCall(made.name, made.arguments, "call_0")
    return Message("assistant", "", (call,)), Message("tool", answer, (), "call_0")


def test_where_the_shell_is_counts_as_unknown_once_a_written_command_may_have_moved_it() -> None:
    here = Message("user", "(Current directory: /a)")
    for moved, paid in (("ls /b", 1.0), ("cd /b", 0.0)):
        history = (here, block(moved), Message("user", "ok"))
        assert reward(block("cat /a/x"), block("cat x"), history=history, domain="swe") == paid


def test_where_the_shell_is_counts_as_unknown_once_it_may_have_moved() -> None:
    """The harness said /repo, then an unanswered `cd`: `rm a` is no longer `rm /repo/a`."""
    told = (Message("user", "go"), *done(bash("ls"), "a\n[Current working directory: /repo]"))
    read, moved = (*told, *done(bash("cat b"), "cd is only a word here")), (*told, *done(bash("cd /tmp && ls"), "b"))
    paid = {name: reward(bash("rm a"), bash("rm /repo/a"), history=h) for name, h in (("read", read), ("moved", moved))}
    assert paid == {"read": 1.0, "moved": 0.0}
    for command, paid_for in ((". ./enter.sh", 0.0), ("ls && . enter.sh", 0.0), ("find . -name b", 1.0)):
        history = (*told, *done(bash(command), "b"))
        assert (
            reward(bash("rm a"), bash("rm /repo/a"), history=history) == paid_for
        )  # `.` reads a script, as source does
    assert reward(bash("cd /repo && make"), bash("make"), history=moved) == 0.0
    assert reward(bash("rm a"), bash("rm /tmp/a"), history=(*moved, *done(bash("pwd"), "<cwd>/tmp</cwd>"))) == 1.0


SCREENS = {
    "home": ("cd", "root@h:/app# cd\nroot@h:~# ", None),
    "below home": ("cd src", "root@h:/app# cd src\nroot@h:~/src# ", None),
    "an environment": (
        "source /venv/bin/activate && cd /src",
        "root@h:/app# source /venv/bin/activate && cd /src\n(venv) root@h:/src# ", "/src",
    ),
    "glued to the output": ("cd /data && cat c", 'root@h:/app# cd /data && cat c\n{"a": 1}root@h:/data# ', "/data"),
    "glued to the output, cleared": ("cd /data && cat c.json", '{"a": 1}root@h:/data#\n\n\n', "/data"),
    "a prompt that says nothing": ("cd /src", "New Terminal Output:\n$ ", None),
    "a command behind others": ("ls\ncd /src", "$ ", None),
    "a script that is read": (". ./env.sh", "$ ", None),
    "still running": ("make", "root@h:/app# make\ngcc -c a.c", None),
    "a program that asks": ("python3", "root@h:/app# python3\n>>> ", None),
    "nothing moved": ("ls", "a.py", "/app"),
    "a prompt that stays": ("ls", "root@h:/app# ls\na.py\nroot@h:/app# ", "/app"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCREENS)
def test_the_last_prompt_says_where_the_shell_is(case: str) -> None:
    keys, screen, folder = SCREENS[case]
    told = Message("user", "Current Terminal Screen:\n(base) root@h:/app# ")
    typed = call("bash_command", keystrokes=keys + "\n")
    made = ToolCall("shell", {"command": ["bash", "-lc", keys]})
    for said in (terminus(keys + "\n"), typed, act(made), act(text=keys), block(keys)):
        history = (told, said, Message("tool" if said.tool_calls else "user", screen))
        assert folder_in(history) == folder
        for where in ("/app", "/src", "/data"):
            worth = reward(terminus("rm a\n"), terminus(f"rm {where}/a\n"), history=history)
            assert worth == float(where == folder)


def test_an_address_inside_a_text_is_no_prompt_that_the_shell_is_behind() -> None:
    shown = "ssh root@h:/srv# ls\nand so on"
    assert folder_in((Message("user", "<cwd>/repo</cwd>"), bash("cat README"), Message("tool", shown))) is None
    assert folder_in((Message("tool", f"{shown}\n[Current working directory: /repo]"),)) == "/repo"
    assert folder_in((Message("user", "Go."), bash("cat README"), Message("tool", "git@github.com:a/b.git"))) == ""
    assert folder_in((Message("tool", "a@b:" * 20_000 + "@" * 20_000 + "\n" * 20_000 + "."),)) == ""


GYM = "nemo_gym/{}.jsonl.xz"


def test_real_prompts_are_read(shared_data: Path) -> None:
    """All are `(testbed) root@...:/testbed#` or `root@...:/app#`, some of them glued to what was printed before."""
    for name, where, known, unknown in (
        ("resources_servers__terminus_judge__data__example", "/testbed", 5, 0),
        ("responses_api_agents__harbor_agent__example__example_output", "/app", 30, 10),
    ):
        traces, _ = import_chat([shared_data / GYM.format(name)])
        histories = [state.history for trace in traces for state in candidates(trace)]
        found = [folder_in(history) for history in histories]
        assert (found.count(where), found.count(None)) == (known, unknown)
        waiting = [re.search(r"@[\w.-]+:(/\w+)#\s*\Z", history[-1].content) for history in histories]
        assert found == [None if prompt is None else prompt[1] for prompt in waiting]
