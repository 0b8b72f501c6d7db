"""How fast the rollout browser opens and answers: a page of 10,000 nodes in headless Chromium.

    python benchmarks/browser.py --json -

Seconds from navigation to the drawn tree, and milliseconds to the painted detail of a node: from a click on it, and
from a key that jumps to the other end of the group. Medians.
Needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from chromium import browser
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.messages import Message
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.trees import KeptTree
from turntree.report.browser import fitting, render

# the row in the middle of the tree, once the tree is scrolled to a share of its height
CLICK = """
const [share, done] = arguments;
const tree = document.getElementById("tree");
const box = tree.getBoundingClientRect();
const painted = (then) => requestAnimationFrame(() => setTimeout(then, 0));
tree.scrollTop = share * (tree.scrollHeight - tree.clientHeight);
painted(() => painted(() => {
  const row = document.elementFromPoint(box.left + 100, box.top + box.height / 2).closest(".row");
  const begun = performance.now();
  row.click();
  painted(() => done(performance.now() - begun));
}));
"""
KEY = """
const [key, done] = arguments;
const begun = performance.now();
document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun), 0));
"""
CLICKS = 16


def group(number: int, chains: int, turns: int) -> KeptTree:
    """Independent rollouts of turns with 20 sampled tokens and 60 observed ones."""
    tree = RolloutTree(f"task {number}")
    root = tree.add(None, NodeKind.PROMPT, tuple(range(200)), messages=(Message("user", "a task " * 40),)).id
    credit, verdicts = {}, {}
    for chain in range(chains):
        leaf = root
        for turn in range(turns):
            said = (Message("assistant", f"action {turn} of rollout {chain}, in a few words"),)
            values = (-0.25,) * 20
            leaf = tree.add(
                leaf, NodeKind.COMPLETION, tuple(range(20)), logprobs=values, entropies=(0.5,) * 20, messages=said
            ).id
            credit[leaf] = NodeCredit(0.5, -0.25, 1.0)
            seen = (Message("tool", "what the tool answered " * 10),)
            leaf = tree.add(leaf, NodeKind.OBSERVATION, tuple(range(60)), messages=seen).id
        tree.stop(leaf, StopReason.COMPLETED)
        verdicts[leaf] = Verdict(float(chain % 2), "because")
    found = Credit(credit, 1.0, 1.0, False)
    return KeptTree(id=str(number), iteration=1, tree=tree, rewards=Rewards(verdicts), credit=found)


def measure(groups: list[KeptTree], repeats: int) -> dict[str, float]:
    opened, clicked, jumped = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trees.html"
        path.write_text(render(fitting(groups, "benchmark")), encoding="utf-8")
        for _ in range(repeats):
            with browser() as window:
                begun = time.perf_counter()
                window.get(path.as_uri())
                rows = window.execute_script("return document.querySelectorAll('.row').length")
                opened.append(time.perf_counter() - begun)
                clicked += [window.execute_async_script(CLICK, click / CLICKS) for click in range(CLICKS)]
                jumped += [window.execute_async_script(KEY, key) for key in ("End", "Home") * 4]
        return {
            "nodes": sum(len(group.tree) for group in groups),
            "drawn_rows": rows,
            "page_megabytes": round(path.stat().st_size / 1e6, 2),
            "open_seconds": round(statistics.median(opened), 3),
            "click_milliseconds": round(statistics.median(clicked), 1),
            "jump_milliseconds": round(statistics.median(jumped), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="PATH", help="'-' is standard output")
    options = parser.parse_args()
    found = {
        "ten_thousand_nodes_in_60_groups": measure([group(n, 8, 10) for n in range(62)], options.repeats),
        "ten_thousand_nodes_in_one_group": measure([group(0, 64, 78)], options.repeats),
    }
    text = json.dumps(found, indent=2)
    if options.json and options.json != "-":
        Path(options.json).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
