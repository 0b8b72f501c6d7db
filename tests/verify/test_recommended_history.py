"""What `recommended` takes from the history: where the shell is, and what files hold."""

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


def edit(**arguments: Any) -> Message:
    return call("str_replace_editor", path="/r/a.py", **arguments)


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


class TestFilesOfAHistory:
    CREATED = done(edit(command="create", file_text="x = 1\ny = 2\n"), "File created")
    GOLD = edit(command="str_replace", old_str="x = 1", new_str="x = 3")
    LONGER = edit(command="str_replace", old_str="x = 1\ny = 2", new_str="x = 3\ny = 2")

    def test_a_longer_edit_of_a_known_file_is_paid(self) -> None:
        assert reward(self.GOLD, self.LONGER, history=self.CREATED) == 1.0

    def test_a_file_that_exists_cannot_be_created(self) -> None:
        whole = edit(command="create", file_text="x = 3\ny = 2\n")
        assert reward(self.GOLD, whole, history=self.CREATED) == 0.0

    @pytest.mark.parametrize(
        "since",
        [
            call("str_replace_editor", command="str_replace", path="/r/./a.py", old_str="y = 2", new_str="y = 5"),
            call("format_code", target="all"),
            bash("ls && echo y = 5 > /r/a.py"),
        ],
    )
    def test_a_file_that_may_have_changed_is_not_known(self, since: Message) -> None:
        assert reward(self.GOLD, self.LONGER, history=self.CREATED + done(since, "done")) == 0.0

    @pytest.mark.parametrize(
        "answer",
        [
            "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>",
            "<tool_use_error>File has been modified since read, either by the user or by a linter.</tool_use_error>",
            "File has been updated since it was read. Read it again.",
            "File already exists at: /r/a.py. Cannot overwrite files using command `create`.",
            "<tool_use_error>String to replace not found in file: successfully</tool_use_error>",
            "The file was not successfully written",
            "No replacement was performed.\nprint('successfully')",
            "The file /r/a.py has not been edited.",
            "Permission denied",
            "",
        ],
    )
    def test_a_write_that_may_have_been_refused_says_nothing(self, answer: str) -> None:
        history = done(edit(command="create", file_text="x = 1\ny = 2\n"), answer)
        assert reward(self.GOLD, self.LONGER, history=history) == 0.0

    @pytest.mark.parametrize(
        "answer",
        [
            "File created successfully at: /r/a.py",
            "The file /r/a.py has been edited. Here's the result of running `cat -n` on a snippet of it:\n 1\terror",
            "The file /r/a.py has been updated successfully. (file state is current - no need to Read it back)",
            '{"bytes_written": 1313, "dirs_created": true}',
            "Successfully created and wrote to new file: /r/a.py",
            "Wrote file successfully.",
            "ok",
        ],
    )
    def test_a_write_that_the_editor_says_was_made_is_known(self, answer: str) -> None:
        history = done(edit(command="create", file_text="x = 1\ny = 2\n"), answer)
        assert reward(self.GOLD, self.LONGER, history=history) == 1.0

    def test_an_editor_that_is_not_told_what_to_do_does_nothing(self) -> None:
        untold = edit(old_str="x = 1\ny = 2", new_str="x = 3\ny = 2")
        seen = done(edit(command="view"), "     1\tx = 1\n     2\ty = 2")
        assert reward(self.GOLD, self.LONGER, history=seen) == 1.0
        assert reward(self.GOLD, untold, history=seen) == reward(self.GOLD, untold, history=self.CREATED) == 0.0

    def test_nothing_to_put_there_is_said_or_left_out(self) -> None:
        said, left_out = (edit(command="str_replace", old_str="x = 1", **new) for new in ({"new_str": ""}, {}))
        assert reward(said, left_out) == reward(left_out, said) == 1.0
        assert reward(self.GOLD, left_out) == 0.0

    def test_an_answer_belongs_to_the_turn_before_it(self) -> None:
        failed = done(edit(command="str_replace", old_str="zzz", new_str="a"), "Error: no match")
        history = (*self.CREATED, *failed, *done(bash("ls"), "a.py"))
        assert reward(self.GOLD, self.LONGER, history=done(bash("ls"), "Error: x") + self.CREATED) == 1.0
        assert reward(self.GOLD, self.LONGER, history=history) == 0.0  # what a failed edit left is not known


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
            worth = reward(terminus("rm a\n"), terminus(f"rm {where}/a\n"), history=history, folder="/app")
            assert worth == float(where == folder), "the option says nothing where the shell has left its folder"


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
