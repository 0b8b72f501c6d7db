"""`recommended`: what does the same is paid, what does not is not, and every leak of published verifiers is closed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tree_sitter_bash")

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.render.tool_calls import parse_message
from turntree.stages.score import read_actions
from turntree.verify.paper import Paper
from turntree.verify.recommended import Recommended
from turntree.verify.texts import calls_in, form_of, last_block, same_text, shell_fences


def act(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, calls)


def bash(command: Any, name: str = "execute_bash", **more: Any) -> Message:
    return act(ToolCall(name, {"command": command, **more}))


def call(name: str, **arguments: Any) -> Message:
    return act(ToolCall(name, arguments))


def terminus(*keys: str, done: bool = False) -> Message:
    commands = [{"keystrokes": k, "duration": 1.0} for k in keys]
    return act(text=json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}))


def reward(gold: Message, tried: Message, *tools: Any, history: tuple[Message, ...] = (), **options: Any) -> Any:
    return Recommended(**options).judge(TurnState("t", 0, history, gold, tools), tried).reward


SAME = {
    "a trailing newline": (bash("ls"), bash("ls\n")),
    "another timeout": (bash("ls", timeout=5), bash("ls", timeout="10")),
    "a free-text description": (bash("ls"), bash("ls", description="list files")),
    "verbosity": (bash("pytest -v tests/a.py"), bash("pytest -xvs tests/a.py")),
    "the order of paths": (bash("pytest a.py b.py"), bash("pytest b.py a.py")),
    "a shell's argument list": (bash(["bash", "-lc", "ls -la"], "shell"), bash(["bash", "-lc", "ls -al"], "shell")),
    "the path of a shell": (bash(["/bin/sh", "-c", "ls -la"], "shell"), bash(["sh", "-c", "ls -al"], "shell")),
    "numbers by value": (call("f", x=1, y="a b"), call("f", y="a b", x=1.0)),
    "case of a message": (act(text="Hello there"), act(text="hello  there")),
    "a wider view": (
        call("str_replace_editor", command="view", path="/a/b.py", view_range=[10, 20]),
        call("str_replace_editor", command="view", path="/a/b.py", view_range=[8, 24]),
    ),
    "a query's case and question mark": (call("web_search", query="Who is X?"), call("web_search", query="who is x")),
    "keystrokes cut otherwise": (terminus("cd a\n", "ls\n"), terminus("cd a\nls\n")),
    "a Terminus answer in a fence": (terminus("ls\n"), act(text="```json\n" + terminus("ls\n").content + "\n```")),
    "a command in a fence": (act(text="so\n\n```bash\nls -la\n```"), act(text="or\n\n```bash\nls -al\n```")),
    "a ReAct action": (act(text="Thought: a\nAction: Search[Milhouse]"), act(text="Action 1: search[milhouse]")),
    "reading calls in another order": (
        act(*bash("ls").tool_calls, *bash("cat a").tool_calls), act(*bash("cat a").tool_calls, *bash("ls").tool_calls),
    ),
}  # fmt: skip


def test_an_anchor_is_on_the_same_page() -> None:
    assert reward(call("goto", url="https://a.b/c#top"), call("goto", url="https://A.b/c")) == 1.0


@pytest.mark.parametrize("name", SAME)
def test_what_does_the_same_is_paid(name: str) -> None:
    gold, tried = SAME[name]
    assert reward(gold, tried) == reward(tried, tried) == 1.0


# the leaks of docs/results/verifiers.md, which lie in benchmarks/leaks so that anyone can judge them

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def leaks() -> Any:
    spec = importlib.util.spec_from_file_location("leaks", ROOT / "benchmarks" / "leaks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_leak_of_the_released_servers_is_not_paid_and_nemo_says_what_they_pay(leaks: Any) -> None:
    found = leaks.rows()
    assert len(found) == 13
    judged = [row for row in found if row["nemo"] is not None]  # what `swe_pivot` pays is a record
    assert len(judged) == 9 and [row["nemo"] for row in judged] == [row["released"] for row in judged]
    assert [row["recommended"] for row in found] == [0.0] * 13


def test_the_page_of_results_shows_what_is_paid_now(leaks: Any) -> None:
    table = "\n".join(leaks.table(leaks.rows()))
    assert table in (ROOT / "docs" / "results" / "verifiers.md").read_text(), f"paste this:\n{table}"


def test_every_leaked_demonstration_is_paid_itself(leaks: Any) -> None:
    for said in read_actions(leaks.LEAKS / "gold.jsonl"):
        assert reward(said.action, said.action) == 1.0


CALLED = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ([], None),
        ({"status": "failed", "error": {"code": "server_error"}, "output": []}, "status"),
        ({"status": "incomplete", "output": [CALLED]}, "status"),
        ({"role": "assistant", "content": None, "error": "timeout"}, "error"),
        ({"role": "assistant", "content": "", "tool_call": []}, "tool_call"),
        (
            {"messages": [{"role": "user", "content": "hi", "colour": 1}, {"role": "assistant", "content": ""}]},
            "colour",
        ),
        ([{"type": "message", "role": "user", "content": "hi"}], None),
    ],
)
def test_what_no_policy_did_is_no_action_to_judge(tmp_path: Path, row: Any, field: str | None) -> None:
    """A server's failure, a cut turn, a misspelt key: each would be worth 0, as if the policy had failed."""
    (tmp_path / "rows").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError) as error:
        list(read_actions(tmp_path / "rows"))
    assert (error.value.field, error.value.line) == (field, 1)


def test_a_call_with_a_key_twice_is_no_call() -> None:
    twice = '<tool_call>{"name": "pay", "arguments": {"to": "eve", "to": "bob"}}</tool_call>'
    assert parse_message(twice, "hermes").tool_calls == ()


def test_a_tool_may_be_named_as_a_harness() -> None:
    tool = {"type": "function", "function": {"name": "terminus", "parameters": None}}
    called = act(ToolCall("terminus", {"a": 1}))
    for verifier in (Recommended(), Paper()):
        assert verifier.judge(TurnState("t", 0, (), called, (tool,)), called).reward == 1.0


def test_in_a_terminal_a_text_is_a_command_and_elsewhere_words() -> None:
    shown, same, other = act(text="ls -la /tmp"), act(text="ls -al /tmp\n"), act(text="ls -al /var")
    assert [reward(shown, one, domain="terminal") for one in (same, other, act())] == [1.0, 0.0, 0.0]
    assert reward(shown, act(text="rm -rf /tmp"), domain="terminal") == 0.0
    assert reward(shown, same) == 0.0
    tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
    assert reward(shown, same, tool, domain="terminal") == 0.0  # there are calls to act with


class TestMatching:
    def test_one_call_cannot_be_spent_on_two_and_is_spent_on_the_right_one(self) -> None:
        def views(*spans: tuple[int, int]) -> Message:
            return act(*(ToolCall("view", {"path": "a", "view_range": list(span)}) for span in spans))

        gold = views((10, 20), (12, 18))
        assert reward(gold, views((12, 20), (10, 20))) == 1.0  # greedy pairing gives (10, 20) to the second
        assert reward(gold, views((12, 18), (12, 18))) == 0.0

    def test_acting_calls_keep_their_order(self) -> None:
        one, other = bash("make").tool_calls, bash("make test").tool_calls
        assert reward(act(*one, *other), act(*other, *one)) == 0.0
        assert reward(act(*one, *other), act(*one, *other)) == 1.0


@pytest.mark.parametrize("rule", [Recommended, Paper])
def test_a_call_that_is_only_written_is_no_call_where_calls_are_made(rule: Any) -> None:
    state = TurnState("t", 0, (), bash("ls", "bash"))
    assert rule().judge(state, act(text="```bash\nls\n```")).reward == 0.0
    state = TurnState("t", 0, (), act(text="```bash\nls\n```"))
    assert rule().judge(state, bash("ls", "bash")).reward == 0.0


def test_the_answer_of_another_harness_is_refused_as_the_harness_would() -> None:
    first = {"keystrokes": "ls\n", "is_blocking": True, "timeout_sec": 1}
    other = {"state_analysis": "a", "explanation": "b", "commands": [first], "is_task_complete": False}
    gold, tried = terminus("ls\n"), act(text=json.dumps(other))
    assert reward(tried, tried) == 1.0
    assert reward(gold, tried) == reward(tried, gold) == 0.0
    del first["timeout_sec"]  # which Terminus 1 requires
    assert reward(act(text=json.dumps(other | {"commands": []})), act(text=json.dumps(other))) == 0.0


def typed(keys: str, **more: Any) -> Message:
    return call("bash_command", keystrokes=keys, **more)


class TestKeystrokes:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("make install\n", "make install"),  # never sent
            ("", "\n"),  # waits; answers a question with its default
            ("\n", "\n\n"),
            ("y", ""),
            ("rm a # ", "rm a "),  # the next keys go on with this line
            ("    return 1\n", "return 1\n"),
            ("  x = 1 # a\n", "x = 1\n"),
            ("python\nfor x in y:\n  f(x)\n", "python\nfor x in y:\nf(x)\n"),
            ("apt install x\n\n", "apt install x\n"),
        ],
    )
    def test_what_a_terminal_is_sent_counts_to_its_enter(self, one: str, other: str) -> None:
        for say in (typed, terminus):
            assert reward(say(one), say(other)) == reward(say(other), say(one)) == 0.0
            assert reward(say(one), say(one)) == 1.0

    def test_spacing_and_the_order_of_options_say_nothing_in_a_command_that_is_sent(self) -> None:
        for say in (typed, terminus):
            assert reward(say("ls  -la a\n"), say("ls -a -l a\n")) == 1.0

    def test_how_long_it_looks_on_says_nothing(self) -> None:
        assert reward(typed("ls -la\n", duration=0.1), typed("ls -al\n", duration=0.5, wait=True)) == 1.0
        assert reward(bash("sleep 1", duration=1), bash("sleep 1", duration=2)) == 0.0  # of a tool that types nothing

    def test_a_line_that_is_not_sent_yet_keeps_its_place(self) -> None:
        calls = [call for keys in ("ls", "\n") for call in typed(keys).tool_calls]
        assert reward(act(*calls), act(*calls[::-1])) == 0.0
        calls = [call for keys in ("ls\n", "cat a\n") for call in typed(keys).tool_calls]
        assert reward(act(*calls), act(*calls[::-1])) == 1.0

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (("C-c", "ls\n"), ("C-cls\n",)),
            (("C-c",), ("C-", "c")),
            (("rm a # ", "C-c", "\n"), ("rm a # ", "Enter", "\n")),
            (("ls", "Enter"), ("lsEnter",)),
        ],
    )
    def test_the_name_of_a_key_is_no_text(self, one: tuple[str, ...], other: tuple[str, ...]) -> None:
        assert reward(terminus(*one), terminus(*other)) == reward(terminus(*other), terminus(*one)) == 0.0
        assert reward(terminus(*one), terminus(*one)) == 1.0
        assert reward(terminus("l", "s\n"), terminus("ls\n")) == 1.0


class TestDone:
    @pytest.mark.parametrize(
        ("gold", "tried"),
        [
            (bash("ls"), call("finish", message="done")),
            (call("finish", message="done"), bash("ls")),
            (terminus("ls\n", done=True), terminus("ls\n")),
            (terminus("ls\n"), terminus("ls\n", done=True)),
            (bash("ls"), act(text="The task is done.")),
        ],
    )
    def test_being_done_is_checked_in_both_directions(self, gold: Message, tried: Message) -> None:
        assert reward(gold, tried) == 0.0


def tool(name: str, *required: str, **more: str) -> dict[str, Any]:
    """The declaration of a tool whose arguments are texts, or of the types in `more`."""
    properties = {key: {"type": "string"} for key in required} | {key: {"type": kind} for key, kind in more.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class TestAnswers:
    PAIRS = (
        (call("finish", message="Paris"), call("finish", message="Rome")),
        (call("submit", summary="Paris"), call("submit", summary="Rome")),
    )

    @pytest.mark.parametrize(("gold", "tried"), PAIRS)
    def test_a_text_that_a_finish_tool_requires_is_the_answer(self, gold: Message, tried: Message) -> None:
        made = gold.tool_calls[0]
        declared = tool(made.name, *made.arguments)
        assert (reward(gold, tried, declared), reward(gold, gold, declared)) == (0.0, 1.0)
        parameters = {"$ref": "#/$defs/a", "$defs": {"a": declared["function"]["parameters"]}}
        assert (
            reward(gold, tried, {"type": "function", "function": {"name": made.name, "parameters": parameters}}) == 0.0
        )
        assert reward(gold, tried) == 0.0  # nothing says what is required

    @pytest.mark.parametrize(("gold", "tried"), PAIRS)
    def test_a_text_that_may_be_left_out_is_for_the_user(self, gold: Message, tried: Message) -> None:
        made = gold.tool_calls[0]
        assert reward(gold, tried, tool(made.name, **dict.fromkeys(made.arguments, "string"))) == 1.0

    def test_the_message_of_openhands_is_for_the_user_because_another_argument_says_the_outcome(self) -> None:
        gold, other = (call("finish", message=text, task_completed="true") for text in ("Done.", "I fixed it."))
        declared = tool("finish", "message", "task_completed")
        assert reward(gold, other, declared) == reward(gold, other) == 1.0
        assert reward(gold, call("finish", message="Done.", task_completed="false"), declared) == 0.0


class TestQueries:
    def test_a_search_in_files_is_compared_letter_by_letter(self) -> None:
        gold, tried = (call("search", query=text, path="src") for text in ("class Foo", "class foo"))
        assert (reward(gold, tried), reward(gold, gold)) == (0.0, 1.0)
        gold, tried = (call("search", query=text) for text in ("class Foo", "class foo"))
        assert reward(gold, tried, tool("search", "query", glob="string")) == 0.0
        assert reward(gold, tried, tool("search", "query", top_k="integer")) == 1.0

    def test_a_pattern_is_compared_letter_by_letter(self) -> None:
        assert reward(call("search", query=r"self\.x\."), call("search", query="self\\.x\\")) == 0.0


class TestEdits:
    def test_an_edit_is_what_it_takes_away_and_puts_there_in_that_file(self) -> None:
        gold = call("edit", path="/a.py", old_string="x = 1", new_string="x = 2")
        same = call("edit", path="/./a.py", old_string="x = 1", new_string="x = 2", explanation="as asked")
        assert reward(gold, same) == 1.0
        for other in ({"new_string": "x = 3"}, {"path": "/b.py"}, {"old_string": "x = 1\ny", "new_string": "x = 2\ny"}):
            given = {"path": "/a.py", "old_string": "x = 1", "new_string": "x = 2", **other}
            assert reward(gold, call("edit", **given)) == 0.0


class TestDeclarations:
    SHELL = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"],
                           "additionalProperties": False},
        },
    }  # fmt: skip

    def test_what_breaks_the_declaration_is_not_paid_even_if_it_would_not_act(self) -> None:
        assert reward(bash("ls", "bash"), bash("ls ", "bash"), self.SHELL) == 1.0
        assert reward(bash("ls", "bash"), bash("ls", "bash", description="x"), self.SHELL) == 0.0
        assert reward(bash("ls", "bash"), call("bash"), self.SHELL) == 0.0

    def test_a_demonstration_that_breaks_it_judges_nothing(self) -> None:
        assert reward(bash("ls", "sh"), bash("ls", "sh"), self.SHELL) is None

    def test_a_description_acts_where_no_shell_is_called(self) -> None:
        assert reward(call("create_issue", description="a"), call("create_issue", description="b")) == 0.0
        assert reward(call("create", title="t", description="a"), call("create", title="t", description="b")) == 0.0

    def test_the_folder_that_the_harness_says_is_where_paths_begin(self) -> None:
        said = (Message("tool", "ok\n[Current working directory: /repo]"),)
        assert reward(bash("cat src/a.py"), bash("cat /repo/src/a.py"), history=said) == 1.0
        assert reward(bash("cat src/a.py"), bash("cat /repo/src/a.py")) == 0.0
        assert reward(bash("ls"), bash("ls", workdir="."), history=said) == 1.0
        assert reward(bash("ls"), bash("ls", workdir="/repo/"), history=said) == 1.0
        assert reward(bash("ls"), bash("ls", workdir="b"), history=said) == 0.0


class TestOptions:
    def test_messages_are_exact_anything_or_not_judged(self) -> None:
        gold, other = act(text="Your refund is on its way."), act(text="Refunded.")
        assert [reward(gold, other, messages=m) for m in ("exact", "any", "unjudged")] == [0.0, 1.0, None]
        assert [reward(gold, act(), messages=m) for m in ("exact", "any", "unjudged")] == [0.0, 0.0, 0.0]

    def test_kinds_and_idle_arguments_can_be_declared(self) -> None:
        gold, tried = call("run", line="ls -la", command="ls -la"), call("run", line="x", command="ls -al")
        assert reward(gold, tried) == 0.0
        assert reward(gold, tried, kinds={"run": "shell"}, idle={"run": ("line",)}) == 1.0
        with pytest.raises(ConfigError, match="use one of"):
            Recommended(kinds={"run": "shel"})


class TestThen:
    def test_a_function_of_ones_own_decides_what_rules_leave_open_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "my_then.py").write_text("def judge(state, action, *, worth: float = 1.0):\n    return worth\n")
        monkeypatch.syspath_prepend(tmp_path)
        rules = Recommended(then=Part("my_then:judge", {"worth": 0.5}))
        assert "then=my_then:judge@" in rules.name

        def judged(gold: Message, tried: Message) -> float | None:
            return rules.judge(TurnState("t", 0, (), gold), tried).reward

        assert judged(bash("make"), bash("make all")) == 0.5
        assert judged(act(text="Hello"), act(text="Hi")) == 0.5
        assert judged(bash("make"), bash("make\n")) == 1.0
        for tried in (bash("make; rm -rf /"), bash("make", "sh"), act(), act(*bash("make").tool_calls * 2)):
            assert judged(bash("make"), tried) == 0.0
        assert judged(terminus("make\n"), terminus("make\n", done=True)) == 0.0

    def test_executed_plays_what_rules_leave_open(self) -> None:
        rules = Recommended(then=Part("executed"), environment=Part("household"))
        assert "then=executed/1+compare=either+environment=household@" in rules.name
        with pytest.raises(ConfigError, match="`executed` plays actions and needs one"):
            Recommended(then=Part("executed"))


class TestPaper:
    def paper(self, gold: Message, tried: Message, **options: Any) -> float | None:
        return Paper(**options).judge(TurnState("t", 0, (), gold), tried).reward

    def test_swe_matches_names_only(self) -> None:
        edit = call("str_replace_editor", command="create", path="/a", file_text="x")
        assert self.paper(edit, call("str_replace_editor", command="undo_edit", path="/b")) == 1.0
        assert self.paper(edit, bash("ls")) == 0.0
        assert self.paper(bash("ls"), bash("rm -rf /"), domain="swe") == 1.0

    def test_a_turn_of_a_trace_with_an_editor_is_judged_by_names_alone_whatever_it_calls(self) -> None:
        """The paper's SWE verifier "matches tool-call names only", at every turn of the domain."""
        edit = call("str_replace_editor", command="create", path="/a", file_text="x")
        declared = {"name": "str_replace_editor", "parameters": {"properties": {"command": {}, "path": {}}}}
        for state in (
            TurnState("t", 1, (Message("user", "fix it"), edit, Message("tool", "done")), bash("ls")),
            TurnState("t", 0, (Message("user", "fix it"),), bash("ls"), tools=({"function": declared},)),
        ):
            assert Paper().judge(state, bash("rm -rf /")).reward == 1.0
            assert Paper().judge(state, edit).reward == 0.0
        assert (
            Paper().judge(TurnState("t", 0, (Message("user", "fix it"),), bash("ls")), bash("rm -rf /")).reward == 0.0
        )

    def test_terminal_takes_similar_commands(self) -> None:
        assert self.paper(bash("python train.py --seed 1"), bash("python train.py --seed 2")) == 1.0
        assert self.paper(bash("ls"), bash("make")) == 0.0

    @pytest.mark.parametrize(
        ("domain", "name", "shown", "other"),
        [
            ("terminal", "write_file", {"path": "a.py", "content": "x=1"}, {"path": "/etc/passwd", "content": ""}),
            ("terminal", "submit", {"answer": "42"}, {"answer": "no idea"}),
            ("terminal", "bash", {"command": None}, {"command": 5}),
            ("search", "answer", {"text": "Oslo"}, {"text": "Paris"}),
            ("search", "open_result", {"id": 5}, {"id": 9}),
        ],
    )
    def test_calls_without_a_text_to_compare_are_compared_as_calls(self, domain, name, shown, other) -> None:
        gold, tried = call(name, **shown), call(name, **other)
        assert self.paper(gold, gold, domain=domain) == 1.0 and self.paper(gold, tried, domain=domain) == 0.0
        beside = bash("ls") if domain == "terminal" else call("search", query="shoes")
        both = [act(*beside.tool_calls, *one.tool_calls) for one in (gold, tried)]
        assert self.paper(both[0], both[0], domain=domain) == 1.0 and self.paper(*both, domain=domain) == 0.0

    def test_conversation_compares_calls_and_takes_any_message(self) -> None:
        assert self.paper(call("book", id=1), call("book", id=2)) == 0.0
        assert self.paper(act(text="Hello"), act(text="Hi")) == 1.0
        assert self.paper(act(text="Hello"), act()) == 0.0

    def test_search_takes_a_query_of_common_words(self) -> None:
        gold = call("search", query="population of Berlin 2020")
        assert self.paper(gold, call("search", query="Berlin population 2020")) == 1.0
        assert self.paper(gold, call("search", query="capital of France")) == 0.0


def edit(**arguments: Any) -> Message:
    return call("str_replace_editor", path="/r/a.py", **arguments)


ANOTHER = {
    "text at another line": (call("insert", path="a", line=5, text="x"), call("insert", path="a", line=50, text="x")),
    "text over another range": (
        call("edit", file="a", start_line=1, end_line=2, content="x"),
        call("edit", file="a", start_line=1, end_line=200, content="x"),
    ),
    "over a file instead of behind it": (
        call("write", path="a", content="x", append=True), call("write", path="a", content="x", append=False),
    ),
    "another path beside the right one": (
        call("write", path="a", content="x"), call("write", path="a", file_path="b", content="x"),
    ),
    "code in another block": (call("execute", code="with a:\n  b\nc"), call("execute", code="with a:\n  b\n  c")),
    "a view from before the first line": (
        edit(command="view", view_range=[1, 10]), edit(command="view", view_range=[-5, 10]),
    ),
    "two ranges, of which a tool reads one": (
        call("view", path="a", start_line=1, end_line=9),
        call("view", path="a", offset=1, limit=9, start_line=99, end_line=99),
    ),
    "ten squared for 102": (act(text="pay 10² now"), act(text="pay 102 now")),
    "another route of a page": (call("goto", url="https://a.b/#/home"), call("goto", url="https://a.b/#/settings")),
    "a search operator": (call("web_search", query="cats OR dogs"), call("web_search", query="cats or dogs")),
    "reading before the edit": (
        act(*call("write_file", path="/a", content="x").tool_calls, *bash("cat /a").tool_calls),
        act(*bash("cat /a").tool_calls, *call("write_file", path="/a", content="x").tool_calls),
    ),
    "a script of bash for another shell": (
        bash(["bash", "-c", "ls <(x)"], "shell"), bash(["sh", "-c", "ls <(x)"], "shell"),
    ),
    "a text for a list": (call("write", path="a", tags="[1]"), call("write", path="a", tags=[1])),
}  # fmt: skip


@pytest.mark.parametrize("name", ANOTHER)
def test_what_says_more_than_the_rule_understands_is_not_paid(name: str) -> None:
    gold, tried = ANOTHER[name]
    assert reward(gold, gold) == reward(tried, tried) == 1.0
    assert reward(gold, tried) == reward(tried, gold) == 0.0


def block(*lines: str, thought: str = "so") -> Message:
    return act(text="\n".join([thought, "```", *lines, "```"]))


EDIT = ("edit 6:7", "    x = 1", "end_of_edit")
BLOCKS = {
    "another thought": (block("ls -la"), block("ls -al", thought="or"), 1.0),
    "another command": (block("open a.py"), block("open b.py"), 0.0),
    "an earlier block": (block("ls"), block("pwd", "```", "then", "```", "ls"), 1.0),
    "the last block counts": (block("ls"), block("ls", "```", "then", "```", "pwd"), 0.0),
    "no block": (block("ls"), act(text="ls"), 0.0),
    "a block that is not closed": (block("ls"), act(text="```\nls"), 0.0),
    "the same edit": (block(*EDIT), block(*EDIT, thought="or"), 1.0),
    "an edit that is indented otherwise": (block(*EDIT), block("edit 6:7", "  x = 1", "end_of_edit"), 0.0),
    "an edit of other lines": (block(*EDIT), block("edit 6:8", *EDIT[1:]), 0.0),
    "done too early": (block("python a.py"), block("submit"), 0.0),
    "in tags": (act(text="so\n<command>\nls -la\n</command>"), act(text="<command>ls -al</command>"), 1.0),
    "in tags, not in a block": (act(text="<command>ls</command>"), block("ls"), 0.0),
    "words behind the tags": (act(text="<command>rm A</command> done"), act(text="<command>rm A</command>"), 1.0),
    "tags whose case counts": (act(text="<command>rm A</command> done"), act(text="<command>rm a</command>"), 0.0),
    "a call in tags inside a command": (
        block("grep '<function=f></function>' src"), block("rm -rf src # <function=f></function>"), 0.0,
    ),
    "a call in tags, not in a block": (
        block("ls"), act(text="<function=bash><parameter=command>ls</parameter></function>"), 0.0,
    ),
    "an edit and more": (block(*EDIT, "python a.py"), block("edit 6:7", "  x = 1", "end_of_edit", "python a.py"), 0.0),
    "a comment in an edit": (block("edit 1:1", "# a", "end_of_edit"), block("edit 1:1", "# b", "end_of_edit"), 0.0),
    "another end": (block(*EDIT), block(*EDIT[:2], "end_of_insert"), 0.0),
    "an end that is indented": (block(*EDIT), block(*EDIT[:2], "  end_of_edit"), 0.0),
    "an edit without its end": (block("edit 1:1", "return a"), block("edit 1:1", "return  a"), 0.0),
    "line ends of Windows": (act(text="```\r\nrm A\r\n```"), act(text="```\r\nrm a\r\n```"), 0.0),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_the_last_block_of_a_swe_agent_is_its_command(case: str) -> None:
    shown, tried, worth = BLOCKS[case]
    assert reward(shown, tried, domain="swe") == worth
    message = float(same_text(shown.content, tried.content))
    elsewhere = None if "<function=" in shown.content else message  # a mark without its end
    assert reward(shown, tried) == elsewhere, "elsewhere a block is something that a message shows"
    declared = {"type": "function", "function": {"name": "ls"}}
    assert reward(shown, tried, declared, domain="swe") == message, "tools are declared"


def tagged(name: str, thought: str = "", **told: str) -> Message:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in told.items())
    return act(text=f"{thought}\n<function={name}>\n{body}</function>")


def test_a_call_in_tags_is_a_call() -> None:
    shown = tagged("execute_bash", "Let me look.", command="ls -la")
    assert reward(shown, tagged("execute_bash", command="ls -al", security_risk="LOW")) == 1.0
    assert reward(shown, tagged("execute_bash", command="rm -la")) == 0.0
    assert reward(shown, tagged("finish", command="ls -la")) == 0.0
    twice = act(text=shown.content + shown.content)
    broken = act(text="<function=execute_bash>ls -la</function>")
    again = act(text=shown.content.replace("</function>", "<parameter=command>rm b</parameter></function>"))
    for other in (twice, broken, again, bash("ls -la"), act(text="ls -la")):
        assert reward(shown, other) == 0.0
    edits = [tagged("edit_file", path="a.py", text=text) for text in ("    x", "  x")]
    assert reward(*edits) == 0.0, "spaces of a value count"
    flags = [tagged("edit", path="a.py", old_str="a", new_str="b", replace_all=flag) for flag in ("true", "false")]
    assert reward(*flags) == 0.0 and reward(flags[0], flags[0]) == 1.0
    views = [
        tagged("str_replace_editor", command="view", path="a.py", view_range=lines) for lines in ("[8, 20]", "[7,24]")
    ]
    assert reward(*views) == 1.0
    ids = [tagged("get_order", order=number) for number in ("007", "7")]
    assert reward(*ids) == 0.0 and Paper().judge(TurnState("t", 0, (), ids[0]), ids[1]).reward == 0.0
    fence = act(text="```bash\nls -la\n```")
    assert reward(fence, tagged("bash", command="ls -la")) == 0.0, "its harness knows fences only"
    lost = act(text="```bash\nrm -rf ~; echo '<function=a></function>'\n```")
    assert reward(act(text="```bash\necho '<function=a></function>' > a\n```"), lost) == 0.0


@pytest.mark.parametrize("rule", [Recommended(), Paper()])
def test_a_written_call_that_cannot_be_read_is_not_judged(rule: Any) -> None:
    """It is no message whose words could be said in another case."""
    shown = tagged("bash", command="rm /A")
    for text in (shown.content.replace("</function>", ""), shown.content * 2, "I use <function=x> for it"):
        state = TurnState("t", 0, (), act(text=text))
        assert rule.judge(state, act(text=text.lower())).reward is None
    assert rule.judge(TurnState("t", 0, (), shown), act(text="rubbish")).reward == 0.0
    for name in ("terminus", "bash"):  # no text says what a harness reads as JSON
        for body in ("<parameter=keys>ls</parameter>", ""):
            tried = act(text=f"<function={name}>{body}</function>")
            assert rule.judge(TurnState("t", 0, (), terminus("ls\n")), tried).reward == 0.0


def test_tags_are_found_in_one_pass() -> None:
    for text in ("<function=a>" * 200_000, "</function>" + "<function=a>" * 200_000):
        assert calls_in(act(text=text), form_of(TurnState("t", 0, (), act(text="</function>")), "auto")) is None
    endless = act(text=f"<function=a>{'<parameter=b>' * 200_000}</function>")
    form = form_of(TurnState("t", 0, (), endless), "auto")
    assert calls_in(endless, form) is None and calls_in(act(text="```" + "\n" * 200_000 + "x"), form) is None
    assert last_block("```\n" * 300_001) is not None


def test_fences_are_found_in_one_pass() -> None:
    assert shell_fences("a\n```bash\nls\n```\n```sh\npwd\n```\n```python\nx\n```\n") == ["ls\n", "pwd\n"]
    assert shell_fences("```sh\n" * 300_000) == []  # quadratic once: minutes for 2 MB


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Done: 5  files.", "done: 5 files.", True),
        ("```py\nif a:\n    f()\ng()\n```", "```py\nif a:\n    f()\n    g()\n```", False),
        ("```py\nn = 1\n```", "```py\nN = 1\n```", False),
        ("```py\nn = 1 \n```\n", "```py\nn = 1\n```", True),
        ('so {"keystrokes": "ls"}', 'so {"keystrokes": "LS"}', False),
    ],
)
def test_text_that_may_hold_code_is_compared_as_it_is_written(one: str, other: str, same: bool) -> None:
    assert same_text(one, other) is same is same_text(other, one)
