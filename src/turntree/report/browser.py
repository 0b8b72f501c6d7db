"""The rollout browser: every kept tree of a run on one page that opens from disk, to choose a group and read it.

The page holds the trees as data and draws one group at a time. It shows what the run wrote and computes only sums: the
task, every turn with its tokens, what a step answered, the verdict's reason, decisions with the numbers they saw,
entropy and credit as colour.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.core.tree import Node
from turntree.core.verdict import Verdict
from turntree.logs.rollouts import depth_first
from turntree.logs.rows import ReadReport
from turntree.logs.trees import FILE_NAME, KeptTree, read
from turntree.report.wording import templates
from turntree.run.files import write_text

PAGE = "trees.html"
MAX_NODES = 20_000  # of a page: a browser opens so many at once
_NO_END = Verdict(None, "no rollout ended here: it went on in another branch")


def read_groups(run: Path) -> dict[str, Any] | None:
    """What the page of a run directory, or of a file of trees, holds (`fitting`), with what its tokens read as, and
    how many lines hold no tree; None where the run kept none."""
    source = run / FILE_NAME if run.is_dir() else run
    if not source.exists():
        return None
    report = ReadReport("trees")
    page = fitting(read(source, report), run.resolve().name)
    if not page["groups"] and source == run:
        raise InputError("holds no kept tree", path=run, hint=f"name a run directory, or its {FILE_NAME}")
    used = {token for group in page["groups"] for node in group["nodes"] for token in node["ids"]}
    texts = token_texts(source.parent)
    words = {token: texts[token] for token in sorted(used) if token in texts}
    return page | {"unread": report.dropped.total(), "words": words}


def fitting(trees: Iterable[KeptTree], title: str, *, max_nodes: int = MAX_NODES) -> dict[str, Any]:
    """What a page holds: as many groups as fit (`group_view`), the latest where not all do, and how many were left
    out. Without `words` tokens are numbers."""
    kept: deque[dict[str, Any]] = deque()
    nodes = left_out = 0
    for tree in trees:
        kept.append(group_view(tree))
        nodes += len(tree.tree)
        while nodes > max_nodes and len(kept) > 1:
            nodes -= len(kept.popleft()["nodes"])
            left_out += 1
    return {"title": title, "groups": list(kept), "left_out": left_out, "unread": 0, "words": {}}


def build_browser(run: Path, out: Path | None = None) -> Path | None:
    """Write `trees.html` of a run directory (of a file of trees: a page of its name), and return where it lies; None
    where the run kept no tree. Lines that cannot be read are counted on the page."""
    page = read_groups(run)
    place = out or (run / PAGE if run.is_dir() else run.with_suffix(".html"))
    return None if page is None else write_text(place, render(page))


def render(page: dict[str, Any]) -> str:
    """The page that holds this (`fitting`, `read_groups`)."""
    # inside a script element only this character could end it
    text = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return templates().get_template("browser.html.j2").render(title=page["title"], data=text)


def group_view(kept: KeptTree) -> dict[str, Any]:
    """One group as the page takes it. Nodes lie depth first, so that a row's subtree follows it; `lane` counts the
    forks above a node that it left by another child than the first; `start` numbers the independent rollouts."""
    tree, credit = kept.tree, kept.credit
    verdicts = kept.rewards.verdicts
    rows: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    starts = {node: number for number, node in enumerate(tree.starts(), start=1)}
    parts = tree.parts()
    numbers = {end: number for number, end in enumerate(depth_first(tree), start=1)}
    for node, lane in _depth_first(kept):
        places[node.id] = len(rows)
        row = _node(node) | {"lane": lane, "parent": None if node.parent is None else places[node.parent]}
        if node.id in starts:
            row["start"] = starts[node.id]
        if credit is not None and node.id in credit.nodes:
            found = credit.nodes[node.id]
            row["credit"] = [_short(found.positive), _short(found.negative), _short(found.multiplicity)]
        stop = tree.stop_reason(node.id)
        if node.id in parts:
            row["part"] = numbers[parts[node.id]]
        elif stop is not None:
            verdict = verdicts.get(node.id, _NO_END)
            row["end"] = {"stop": stop.value, "reward": verdict.reward, "reason": verdict.reason}
            row["end"] |= {"success": verdict.success} if verdict.success is not None else {}
            row["end"] |= {"number": numbers[node.id]} if parts and node.id in numbers else {}
        rows.append(row)
    for decision in tree.decisions:
        said = {"actor": decision.actor, "action": decision.action, "reason": decision.reason}
        numbers = {name: _short(value) for name, value in decision.numbers.items()}
        rows[places[decision.node]].setdefault("decisions", []).append({**said, "numbers": numbers})
    return {
        "id": kept.id,
        "iteration": kept.iteration,
        "task": tree.task_id,
        "cut": kept.cut,
        "learned": credit is not None and bool(credit.nodes),
        "tools": list(kept.tools),
        "meta": kept.meta,
        "nodes": rows,
    }


def _depth_first(kept: KeptTree) -> Iterator[tuple[Node, int]]:
    tree, forks = kept.tree, set(kept.tree.branch_points())
    left = [(root, 0) for root in reversed(tree.roots)]
    while left:
        node, lane = left.pop()
        yield tree[node], lane
        further = lane + (node in forks)
        left += [
            (child, further if number else lane) for number, child in reversed(list(enumerate(tree.children(node))))
        ]


def _node(node: Node) -> dict[str, Any]:
    row: dict[str, Any] = {"id": node.id, "kind": node.kind.value, "turn": node.turn, "ids": list(node.token_ids)}
    if node.messages:
        row["messages"] = [message.to_chat() for message in node.messages]
    if node.logprobs is not None:
        row["logprobs"] = [_short(value) for value in node.logprobs]
    if node.entropies is not None:
        row["entropies"] = [_short(value) for value in node.entropies]
    if node.policy_version is not None:
        row["version"] = node.policy_version
    return row


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def token_texts(run_dir: Path) -> dict[int, str]:
    """The text of each token of the run's tokenizer; empty where it has none, or none can be read here."""
    path = run_dir / "model" / "tokenizer.json"
    if not path.exists():
        return {}
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except ModuleNotFoundError:
        notice("the trees show tokens as numbers without tokenizers: pip install 'turntree[train]' names them")
        return {}
    except Exception as error:  # the library raises a bare Exception
        raise InputError(f"is not a tokenizer ({error})", path=path, hint="restore the file") from error
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.get_vocab().values()}
