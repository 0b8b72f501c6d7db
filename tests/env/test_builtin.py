"""The shipped tools, as a policy meets them."""

import pytest

from turntree.core.errors import InputError
from turntree.core.messages import ToolCall
from turntree.env.tools.runtime import ToolRuntime
from turntree.env.tools.tool import ToolStatus
from turntree_worlds.documents import Document
from turntree_worlds.sandboxes.box import SandboxLost
from turntree_worlds.sandboxes.limits import Execution, Limits, SandboxConfig
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.search import SearchIndex, build_index
from turntree_worlds.tools import FindTool, OpenTool, SandboxTool, SearchTool, described


@pytest.fixture(scope="module")
def sandbox():
    try:
        opened = Sandbox(SandboxConfig(boxes=1, limits=Limits(seconds=20.0)))
    except InputError as error:
        pytest.skip(f"no sandbox here: {error}")
    yield opened
    opened.close()


def test_python_shows_output_value_and_errors_and_is_run_each_time(sandbox):
    tools = ToolRuntime([SandboxTool(sandbox)])
    asked = ToolCall("python", {"code": "print('a')\n6 * 7"})
    for _ in range(2):
        assert tools.call(asked).text == "a\n42"
    assert tools.ledger.total().misses == 2
    assert "ZeroDivisionError" in tools.call(ToolCall("python", {"code": "1 / 0"})).text
    assert tools.call(ToolCall("python", {"code": "x = 1"})).text == "[no output]"
    assert tools.call(ToolCall("python", {"source": "1"})).status is ToolStatus.REFUSED


def test_search_shows_numbered_passages(tmp_path):
    build_index([Document("a", "Paris", "The capital."), Document("b", "Lyon", "city " * 500)], tmp_path / "i.db")
    with SearchIndex(tmp_path / "i.db") as index:
        tools = ToolRuntime([SearchTool(index, passage_chars=400)])
        assert tools.call(ToolCall("search", {"query": "capital?"})).text == "[1] Paris\nThe capital."
        assert len(tools.call(ToolCall("search", {"query": "city"})).text) < 500
        assert tools.call(ToolCall("search", {"query": "nowhere"})).text == "no document holds any of these words"


def test_a_search_shows_no_more_of_a_document_than_it_may(tmp_path):
    build_index([Document("a", "Lyon", "city of light " * 500)], tmp_path / "i.db")
    with SearchIndex(tmp_path / "i.db") as index:
        shown = SearchTool(index, passage_chars=20).call({"query": "city"}, 1.0).text
        assert len(shown) == len("[1] Lyon\n") + 20


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "i.db"
    long = "".join(f"Line {number} of the page.\n" for number in range(200))
    build_index([Document("a", "A (band)", "They sing."), Document("b", "A", long), Document("c", "!!!", "")], path)
    with SearchIndex(path) as index:
        yield ToolRuntime([OpenTool(index, part_chars=1000), FindTool(index, count=2, around=5)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"title": "a (BAND) "}, "A (band)\nThey sing."),
        ({"title": "band"}, "error: there is no page 'band'; search for it"),
        ({"title": ""}, "error: there is no page ''; search for it"),
        ({"title": 'A" OR title: x'}, "error: there is no page 'A\" OR title: x'; search for it"),
        ({"title": "A", "part": 99}, "error: 'A' has parts 1 to 5"),
        ({"title": "A", "part": 0}, "error: 'A' has parts 1 to 5"),
    ],
)
def test_a_page_is_opened_by_its_title(pages, arguments, text):
    assert pages.call(ToolCall("open", arguments)).text == text


def test_the_parts_of_a_page_are_the_page(pages):
    parts = [pages.call(ToolCall("open", {"title": "A", "part": part})).text for part in range(1, 6)]
    assert all(part.startswith("A\n") and part.endswith(f"\n[part {n} of 5]") for n, part in enumerate(parts, start=1))
    whole = "".join(part.removeprefix("A\n").rpartition("\n[part")[0] for part in parts)
    assert whole == "".join(f"Line {number} of the page.\n" for number in range(200))


def test_a_part_may_be_written_as_a_whole_float(pages):
    two = pages.call(ToolCall("open", {"title": "A", "part": 2.0}))
    assert two.status is ToolStatus.ANSWERED and two.text.endswith("\n[part 2 of 5]")
    hits = pages.ledger.total().hits
    assert pages.call(ToolCall("open", {"title": "A", "part": 2})) == two and pages.ledger.total().hits == hits + 1
    assert pages.call(ToolCall("open", {"title": "A", "part": 2.5})).status is ToolStatus.REFUSED


def test_find_shows_where_a_text_stands(pages):
    assert pages.call(ToolCall("find", {"title": "A", "text": "LINE 19 "})).text == "[1] age.\nLine 19 of th"
    assert pages.call(ToolCall("find", {"title": "A", "text": "line"})).text.count("[") == 2
    assert pages.call(ToolCall("find", {"title": "A", "text": "(.*)"})).text == "'A' does not hold '(.*)'"
    assert pages.call(ToolCall("find", {"title": "A", "text": ""})).text == "'A' does not hold ''"
    assert (
        pages.call(ToolCall("find", {"title": "B", "text": "x"})).text == "error: there is no page 'B'; search for it"
    )


def ended(**more):
    whole = {"stdout": "", "stderr": "", "value": None, "truncated": False, "timed_out": False, "exit_code": 0}
    return Execution(**{**whole, "seconds": 0.1, **more})


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (ended(stdout="a\n", value="1", stderr="w\n"), "a\n1\nw"),
        (ended(stdout="a\n", timed_out=True, exit_code=None), "a\n[stopped after 2 s]"),
        (ended(stdout="aa", truncated=True, exit_code=None), "aa\n[output cut]\n[stopped: too much output]"),
        (ended(exit_code=139), "[exit code 139]"),
        (ended(exit_code=1, stderr="Error"), "Error"),
    ],
)
def test_every_ending_is_told(execution, text):
    assert described(execution, 2.0) == text


class Unlucky:
    """A sandbox whose boxes die."""

    config = SandboxConfig()

    def run(self, source, *, language):
        raise SandboxLost("the box died")


def test_a_lost_box_censors():
    call = ToolCall("python", {"code": "1"})
    lost = ToolRuntime([SandboxTool(Unlucky())]).call(call)
    assert lost.status is ToolStatus.FAILED and "the box died" in lost.text
