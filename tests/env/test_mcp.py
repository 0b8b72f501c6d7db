"""Tools of an MCP server, through the official SDK and its standard-stream transport."""

import sys
from pathlib import Path
from weakref import WeakSet

import pytest

from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentGone
from turntree.core.messages import Message, ToolCall
from turntree.env.tools.runtime import ToolRuntime, ToolRuntimeConfig
from turntree.env.tools.tool import ToolStatus
from turntree_interop.mcp import McpServer, McpTasks, _output

mcp = pytest.importorskip("mcp")
ODD = [sys.executable, str(Path(__file__).with_name("odd_mcp_server.py"))]
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture(scope="module")
def server():
    with McpServer(COMMAND, pure=["add"]) as opened:
        yield opened


def test_what_an_answer_says_is_shown_wherever_it_stands():
    """A file comes as a resource with its text in it; an answer with a schema may have no text at all."""
    from mcp.types import CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents

    file = EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.py", text="print(1)"))
    image = ImageContent(type="image", data="", mime_type="image/png")
    shown = CallToolResult(content=[TextContent(type="text", text="a.py:"), file, image])
    assert _output(shown).text == "a.py:\nprint(1)\n[image, not shown]"
    assert _output(CallToolResult(content=[], structured_content={"größe": 2})).text == '{"größe": 2}'
    assert _output(CallToolResult(content=[])).text == "[no output]"


def test_its_tools_are_called_checked_and_cached_as_any_other(server):
    tools = ToolRuntime(server.tools)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "fail", "sleep"]
    assert tools.schemas[0]["function"]["description"] == "Add two numbers."
    call = ToolCall("add", {"a": 2, "b": 3})
    assert [tools.call(call).text for _ in range(2)] == ["5", "5"] and tools.ledger.total().hits == 1
    assert tools.call(ToolCall("add", {"a": "two", "b": 3})).status is ToolStatus.REFUSED


def test_an_error_of_the_tool_is_told(server):
    tools = ToolRuntime(server.tools)
    told = [tools.call(ToolCall("fail", {"text": "no such thing"})) for _ in range(2)]
    assert told[0].status is ToolStatus.ANSWERED and "no such thing" in told[0].text
    assert tools.ledger.total().misses == 2


def test_a_slow_tool_is_a_failure_and_the_server_is_of_use_afterwards(server):
    tools = ToolRuntime(server.tools, ToolRuntimeConfig(seconds=0.3))
    assert tools.call(ToolCall("sleep", {"seconds": 1.0})).status is ToolStatus.FAILED
    assert ToolRuntime(server.tools).call(ToolCall("add", {"a": 1, "b": 1})).text == "2"


def test_a_server_that_crashes_is_started_again_and_the_call_is_not_repeated(tmp_path):
    log = tmp_path / "log"
    with McpServer([*ODD, "mortal", str(log)]) as server:
        tools = ToolRuntime(server.tools)
        for count in (1, 2):
            crashed = tools.call(ToolCall("crash", {}))
            assert (crashed.status, crashed.text) == (ToolStatus.FAILED, "crash: MCPError: Connection closed")
            assert tools.call(ToolCall("look", {})).text == "alive"
            assert log.read_text() == "called\n" * count


def test_a_server_that_does_not_come_back_ends_the_run(tmp_path):
    """It is no fault of one rollout: all later ones would be censored."""
    there = tmp_path / "there"
    there.touch()
    command = ["sh", "-c", 'test -e "$0" && exec "$@"', str(there), *ODD, "mortal", str(tmp_path / "log")]
    with McpServer(command) as server:
        tools = ToolRuntime(server.tools)
        there.unlink()
        for name in ("crash", "look"):
            with pytest.raises(EnvironmentGone, match=r"does not come back .* to resume"):
                tools.call(ToolCall(name, {}))


def test_a_server_that_has_forgotten_the_session_is_connected_to_again(monkeypatch):
    with McpServer(COMMAND) as server:
        before = server._client

        async def forgotten(*_, **__):
            raise mcp.MCPError(mcp.types.INVALID_REQUEST, "Session terminated")

        monkeypatch.setattr(before, "call_tool", forgotten)
        tools = ToolRuntime(server.tools)
        told = [tools.call(ToolCall("add", {"a": 1, "b": 1})) for _ in range(2)]
        assert [one.status for one in told] == [ToolStatus.FAILED, ToolStatus.ANSWERED]
        assert server._client is not before


def test_a_server_that_does_not_come_up_is_refused_in_one_line():
    with pytest.raises(InputError, match="does not answer"), McpServer(["/bin/false"]):
        pass


def test_a_pure_tool_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="has no tool 'subtract'"), McpServer(COMMAND, pure=["subtract"]):
        pass


@pytest.mark.parametrize("kind", ["silent", "endless"])
def test_a_server_that_never_comes_to_an_end_is_refused_after_its_time(kind):
    with pytest.raises(InputError, match=r"does not answer \(TimeoutError: its tools were not all listed within 1.5 s"):
        McpServer([*ODD, kind], seconds=1.5).__enter__()
    with pytest.raises(ConfigError):
        McpServer([*ODD, kind], seconds=0)


# tasks


def task_of(server, answer):
    tasks = McpTasks(argument="server", tasks="rows.jsonl")
    row = {"prompt": "How many?", "answer": answer}
    return tasks._task("a", row, ToolRuntime(server.tools), WeakSet(), "server")


@pytest.mark.parametrize("answer", ["7", 7, 0.5, 10**400], ids=["text", "whole", "half", "huge"])
def test_an_answer_is_a_text_or_a_number_of_any_size(server, answer):
    task = task_of(server, answer)
    task.reset()
    assert task.step(Message("assistant", str(answer))).success is True


@pytest.mark.parametrize("answer", ["", " ", True, None, [7], float("nan")])
def test_a_row_whose_answer_no_message_can_be_is_refused(server, answer):
    with pytest.raises(InputError) as refused:
        task_of(server, answer)
    assert (refused.value.field, refused.value.path) == ("answer", "rows.jsonl")
