"""The rollout browser: one page with every kept tree, readable without a network, on a phone and by keyboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chromium import browser
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.trees import KeptTree
from turntree.report.browser import PAGE, build_browser, fitting, render
from turntree.run.jsonl import write_lines

HOSTILE = "</script><script>document.title = 'taken'</script><b>bold</b>"


def forked(number: int, *, rewards: tuple[float | None, float | None] = (1.0, 0.0), task: str = "find it") -> KeptTree:
    """A task, a turn that forked after its answer, two endings."""
    tree = RolloutTree(f"task {number}")
    root = tree.add(None, NodeKind.PROMPT, (1, 2), messages=(Message("user", task),)).id

    def say(parent: int, text: str, *tokens: int) -> int:
        message = Message("assistant", text, (ToolCall("search", {"query": text}),))
        zeros = (-0.5,) * len(tokens)
        return tree.add(
            parent, NodeKind.COMPLETION, tokens, logprobs=zeros, entropies=(1.2,) * len(tokens), messages=(message,)
        ).id

    first = say(root, "look", 3, 4)
    seen = tree.add(first, NodeKind.OBSERVATION, (5,), messages=(Message("tool", "a drawer", name="search"),)).id
    leaves = [say(seen, "open", 6), say(seen, "leave", 7)]
    tree.record(Decision("brancher", seen, "fork", "entropy rose", {"entropy": 0.75, "turn": 2.0}))
    verdicts = {}
    for leaf, reward in zip(leaves, rewards, strict=True):
        tree.stop(leaf, StopReason.COMPLETED if reward is not None else StopReason.ENVIRONMENT_ERROR)
        verdicts[leaf] = Verdict(reward, "it was there" if reward else "it was not", success=bool(reward))
    by = float(len(set(rewards)) > 1)  # equal rewards push nothing
    credit = Credit({first: NodeCredit(by, -by, 2.0), leaves[0]: NodeCredit(by, 0.0, 1.0)}, 3.0, 2.0, not by)
    return KeptTree(id=f"1.{number}", iteration=1, tree=tree, rewards=Rewards(verdicts), credit=credit)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_node_with_what_was_said_decided_and_judged() -> None:
    (group,) = data_of(render(fitting([forked(0)], "run")))["groups"]
    assert [node["kind"] for node in group["nodes"]] == [
        "prompt",
        "completion",
        "observation",
        "completion",
        "completion",
    ]
    assert group["nodes"][0]["messages"] == [{"role": "user", "content": "find it"}]
    assert group["nodes"][2]["decisions"][0]["numbers"] == {"entropy": 0.75, "turn": 2.0}
    assert group["nodes"][1]["credit"] == [1.0, -1.0, 2.0]
    assert group["nodes"][3]["end"] == {"stop": "completed", "reward": 1.0, "reason": "it was there", "success": True}
    assert [node["lane"] for node in group["nodes"]] == [0, 0, 0, 0, 1]
    assert [node["parent"] for node in group["nodes"]] == [None, 0, 1, 2, 2]


def test_a_turn_that_only_thought_is_shown_with_its_thought() -> None:
    tree = RolloutTree("t")
    root = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", "go"),)).id
    thought = Message("assistant", "", reasoning="I should look")
    leaf = tree.add(root, NodeKind.COMPLETION, (2,), logprobs=(-0.5,), messages=(thought,)).id
    tree.stop(leaf, StopReason.COMPLETED)
    kept = KeptTree(id="1.0", iteration=1, tree=tree, rewards=Rewards({leaf: Verdict(0.0, "no")}))
    page = render(fitting([kept], "run"))
    assert data_of(page)["groups"][0]["nodes"][1]["messages"][0]["reasoning_content"] == "I should look"
    assert page.count("message.reasoning_content") == 3  # in the row and the search, and beside it in full


def test_nothing_that_a_policy_says_becomes_markup_and_nothing_is_loaded() -> None:
    page = render(fitting([forked(0, task=HOSTILE)], HOSTILE))
    assert HOSTILE not in page
    assert data_of(page)["groups"][0]["nodes"][0]["messages"][0]["content"] == HOSTILE
    assert not re.search(r'(src|href)\s*=\s*["\']', page)


def test_a_page_holds_what_a_browser_can_open_and_says_what_was_left_out() -> None:
    data = data_of(render(fitting([forked(n) for n in range(10)], "run", max_nodes=16)))
    assert [group["id"] for group in data["groups"]] == ["1.7", "1.8", "1.9"]
    assert data["left_out"] == 7


def test_a_run_without_trees_has_no_page(tmp_path: Path) -> None:
    assert build_browser(tmp_path) is None
    assert not (tmp_path / PAGE).exists()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    groups = [forked(0), forked(1, rewards=(1.0, 1.0)), forked(2, rewards=(None, 0.5), task=HOSTILE)]
    write_lines(folder / "trees.jsonl", (group.to_json() for group in groups))
    path = build_browser(folder)
    assert path is not None
    return path.as_uri()


def test_a_node_is_chosen_by_mouse_and_by_keyboard(page: str) -> None:
    with browser() as window:
        from selenium.webdriver.common.keys import Keys  # absent where the line above skips

        window.get(page)
        rows = window.find_elements("css selector", ".row")
        assert len(rows) == 5
        rows[3].click()
        detail = window.find_element("id", "detail")
        assert "it was there" in detail.text and "search" in detail.text
        body = window.find_element("tag name", "body")
        body.send_keys(Keys.ARROW_UP)
        assert "entropy rose" in detail.text and "0.75" in detail.text
        body.send_keys(Keys.ARROW_LEFT)
        assert "P (up)" in detail.text
        body.send_keys("]")
        assert "task 1" in window.find_element("id", "summary").text
        assert window.get_log("browser") == []


def test_a_reward_is_a_failure_only_beside_a_better_one(page: str) -> None:
    with browser() as window:
        window.get(page)

        def shown() -> tuple[list[str], str]:
            marks = window.find_elements("css selector", ".end")
            return [mark.get_attribute("class") for mark in marks], window.find_element("id", "summary").text

        marks, said = shown()
        assert marks == ["end good", "end bad"] and "learned from" in said
        window.find_element("id", "after").click()  # both rewards are 1
        marks, said = shown()
        assert [mark.strip() for mark in marks] == ["end", "end"]
        assert "no gradient: all rewards equal" in said and "learned from" not in said


def long_group(turns: int) -> KeptTree:
    """One rollout; every turn says its number."""
    tree = RolloutTree("long")
    leaf = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", "count"),)).id
    for turn in range(turns):
        said = (Message("assistant", f"this is number {turn}"),)
        leaf = tree.add(leaf, NodeKind.COMPLETION, (2,), logprobs=(-0.5,), entropies=(0.5,), messages=said).id
    tree.stop(leaf, StopReason.COMPLETED)
    return KeptTree(id="1", iteration=1, tree=tree, rewards=Rewards({leaf: Verdict(1.0, "counted")}), credit=None)


IN_VIEW = """
const box = document.getElementById("tree").getBoundingClientRect();
return [...document.querySelectorAll(".row")].filter((row) => {
  const { top, bottom } = row.getBoundingClientRect();
  return top >= box.top - 1 && bottom <= box.bottom + 1;
}).map((row) => Number(row.dataset.place));
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_group_draws_rows_in_view_only_and_every_node_is_reached(tmp_path: Path, width: int) -> None:
    nodes = 2001
    (tmp_path / PAGE).write_text(render(fitting([long_group(nodes - 1)], "run")), encoding="utf-8")
    with browser(width) as window:
        from selenium.webdriver.common.keys import Keys

        def in_view() -> list[int]:
            places = window.execute_script(IN_VIEW)
            assert places == list(range(places[0], places[-1] + 1)) and len(places) > 1
            assert len(window.find_elements("css selector", ".row")) < 150
            return places

        window.get((tmp_path / PAGE).as_uri())
        body, detail = window.find_element("tag name", "body"), window.find_element("id", "detail")
        assert in_view()[0] == 0
        body.send_keys(Keys.END)
        assert "number 1999" in detail.text and nodes - 1 in in_view()
        body.send_keys(Keys.PAGE_UP)
        (chosen,) = window.find_elements("css selector", '[aria-selected="true"]')
        assert int(chosen.get_attribute("data-place")) in in_view() and f"number {nodes - 2}" not in detail.text
        body.send_keys(Keys.HOME, Keys.ARROW_DOWN)
        assert "number 0" in detail.text and 1 in in_view()
        window.execute_async_script(
            "document.getElementById('tree').scrollTop = 1e9 / 2; requestAnimationFrame(() => setTimeout(arguments[0]))"
        )
        assert in_view()[0] > 1000
        assert window.find_elements("css selector", '[aria-selected="true"]'), "the chosen row exists out of view"
        body.send_keys(Keys.ARROW_DOWN)
        assert "number 1" in detail.text and 2 in in_view()
        find, hits = window.find_element("id", "find"), window.find_element("id", "hits")
        find.send_keys("number 77")
        assert hits.text == "11 found" and 78 in in_view()
        find.send_keys(Keys.ENTER, Keys.ENTER)
        assert hits.text == "2 of 11" and "number 770" in detail.text and 771 in in_view()
        find.send_keys(Keys.SHIFT, Keys.ENTER)
        assert hits.text == "1 of 11"


def test_groups_are_filtered_and_hostile_text_stays_text(page: str) -> None:
    with browser() as window:
        from selenium.webdriver.support.ui import Select

        window.get(page)
        Select(window.find_element("id", "only")).select_by_value("same")
        assert len(Select(window.find_element("id", "group")).options) == 2
        assert window.title == "Rollout trees of " + Path(page).parent.name
        body = window.find_element("tag name", "body")
        body.send_keys("]")
        window.find_elements("css selector", ".row")[0].click()
        assert "<b>bold</b>" in window.find_element("id", "detail").text


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_it_fits_a_phone_and_the_dark(page: str, width: int, dark: bool) -> None:
    with browser(width, 780, dark=dark) as window:
        window.get(page)
        window.find_elements("css selector", ".row")[1].click()
        wide, room = window.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= room
        back, ink = window.execute_script(
            "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
        )
        level = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink)]
        assert (level[0] < level[1]) is dark
        assert window.find_element("id", "detail").is_displayed()


@pytest.mark.parametrize("content", [b"", b"not a tree\n", bytes(range(256))])
def test_a_file_without_a_tree_is_no_page(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match="holds no kept tree"):
        build_browser(file)
    assert not (tmp_path / "some.html").exists()
