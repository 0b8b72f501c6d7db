"""The section of a page that draws one kept tree and leads to the rollout browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turntree.logs.trees import FILE_NAME
from turntree.profiling.rows import message_text
from turntree.report.browser import MAX_NODES, PAGE
from turntree.report.read import Run
from turntree.report.rollout_tree import KeptTrees, deciding_forks, look, tree_of
from turntree.report.tree_figures import rollout_tree
from turntree.report.wording import plural


def with_trees(run: Run) -> dict[str, Path]:
    """The folders of the training runs that kept trees, by arm; that of PivotRL first."""
    folders = {arm.name: arm.folder for arm in run.arms if arm.folder is not None}
    names = sorted(folders, key=lambda name: name != "pivotrl")
    return {name: folders[name] for name in names if (folders[name] / FILE_NAME).exists()}


def of_arms(run: Run, page: Path) -> dict[str, Any]:
    """The section of a page about several arms: a tree of the first that kept any, and where the others' are."""
    folders = with_trees(run)
    if not folders:
        absent = f"No training run in this folder kept its trees ({FILE_NAME})."
        return {"tree_arm": None, "tree": {"kept": None, "absent": absent}, "other_browsers": []}
    (name, folder), *others = folders.items()
    links = [(other, _link(path, page)) for other, path in others]
    return {"tree_arm": name, "tree": view(look(folder), folder, page), "other_browsers": links}


def view(kept: KeptTrees | None, folder: Path, page: Path) -> dict[str, Any]:
    """What the macro `tree_section` shows of the run in `folder`, on a page that will lie at `page`; without trees the
    sentence why there is none."""
    if kept is None:
        return {"kept": None, "absent": f"This run kept no trees: there is no {FILE_NAME} in its folder."}
    shown = {"kept": kept, "link": _link(folder, page), "most_nodes": MAX_NODES, "note": _note(kept, folder)}
    chosen = kept.chosen
    if chosen is None:
        return {**shown, "chosen": None, "absent": "No group has two different rewards, so none is drawn."}
    drawn = tree_of(chosen)
    root = chosen.tree[chosen.tree.roots[0]]
    return {
        **shown,
        "chosen": chosen,
        "asked": "" if root.message is None else message_text(root.message),
        "demonstrated": chosen.meta.get("demonstrated"),
        "chart": rollout_tree(chosen),
        "drawn": drawn,
        "rollouts": len(chosen.rewards.verdicts),
        "forks": sum(leaf.rollout.forked for leaf in drawn.leaves),
        "deciding": deciding_forks(chosen),
    }


def _link(folder: Path, page: Path) -> str:
    """To the browser of a run; a folder may be called `lr=1e-3#2`."""
    return quote(os.path.relpath(folder / PAGE, page.parent))


def _note(kept: KeptTrees, folder: Path) -> str:
    size = (folder / FILE_NAME).stat().st_size
    unread = f"; {plural(kept.unread, 'line')} could not be read" if kept.unread else ""
    return (
        f"{FILE_NAME} holds {plural(kept.groups, 'group')} of {plural(len(kept.iterations), 'iteration')} "
        f"({size / 1e6:,.1f} MB{unread})."
    )
