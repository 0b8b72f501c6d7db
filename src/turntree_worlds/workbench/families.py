"""Generated shell tasks: a folder of small files, and something to find, count, change, move or pack in it.

What is expected is computed here in Python; the expert's commands are another way to it. A test holds the two together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from turntree.core import seeds
from turntree_worlds.sandboxes.limits import File
from turntree_worlds.workbench.tasks import Task, commands, texts


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WORDS = _words(
    "amber birch cedar delta ember fjord grove hazel inlet jade kelp lark maple north ocean pearl quartz river "
    "stone tulip umber vale willow yarrow zephyr"
)
_FOLDERS = ("docs", "notes", "src", "data", "logs", "old", "docs/drafts", "src/lib", "data/raw")
_LEVELS = ("INFO", "WARN", "ERROR")


@dataclass
class _Draft:
    """What a family makes of a folder. `gold` and one of `answer`, `expected` and `check` are filled in."""

    rng: random.Random
    files: dict[str, File]
    say: str = ""
    gold: list[str] = field(default_factory=list[str])
    answer: str | None = None
    expected: Mapping[str, File | None] | None = None
    check: str | None = None

    def text(self, path: str) -> str:
        return self.files[path].data.decode()

    def ending(self, suffix: str) -> list[str]:
        return sorted(path for path in self.files if path.endswith(suffix))

    def file(self, name: str, text: str) -> str:
        """Add a file in a folder of the tree; its path."""
        path = f"{self.rng.choice(_FOLDERS)}/{name}"
        self.files[path] = File(text.encode())
        return path


def _count_files(draft: _Draft) -> None:
    suffix = draft.rng.choice((".txt", ".md", ".log"))
    draft.say = f"How many files here and in all folders below have a name that ends in {suffix}? Submit the number."
    draft.gold = [f"find . -type f -name '*{suffix}' | wc -l"]
    draft.answer = str(len(draft.ending(suffix)))


def _rename(draft: _Draft) -> None:
    old, new = draft.rng.sample((".txt", ".md", ".log", ".bak"), 2)
    draft.file(f"{draft.rng.choice(_WORDS)}{old}", "one more\n")
    draft.files = {path: file for path, file in draft.files.items() if not path.endswith(new)}
    draft.say = f"Rename every file here and in the folders below that ends in {old} so that it ends in {new}."
    draft.gold = [f'find . -type f -name "*{old}" | while read -r f; do mv "$f" "${{f%{old}}}{new}"; done']
    moved = {path.removesuffix(old) + new: draft.files[path] for path in draft.ending(old)}
    draft.expected = {**dict.fromkeys(draft.ending(old)), **moved}


def _replace(draft: _Draft) -> None:
    old, new = draft.rng.sample(_WORDS, 2)
    for path in draft.ending(".txt"):
        draft.files[path] = File(f"{draft.text(path)}{old} {old}s\n".encode())
    draft.say = f"Replace the text {old} by {new}, wherever it stands, in all .txt files here and in the folders below."
    draft.gold = [f"find . -name '*.txt' -exec sed -i 's/{old}/{new}/g' {{}} +"]
    draft.expected = texts({path: draft.text(path).replace(old, new) for path in draft.ending(".txt")})


def _delete(draft: _Draft) -> None:
    for word in draft.rng.sample(_WORDS, draft.rng.randint(2, 4)):
        draft.file(f"{word}.tmp", "scratch\n")
    draft.say = "Delete every file that ends in .tmp, here and in the folders below, and nothing else."
    draft.gold = ["find . -type f -name '*.tmp' -delete"]
    draft.expected = dict.fromkeys(draft.ending(".tmp"))


def _collect(draft: _Draft) -> None:
    word = draft.rng.choice(_WORDS).upper()
    chosen = draft.rng.sample(draft.ending(".txt"), 2)
    for path in chosen:
        draft.files[path] = File(f"{draft.text(path)}{word}\n".encode())
    draft.say = f"Move every .txt file that holds the word {word} to a new folder called {word.lower()}."
    draft.gold = [f"mkdir {word.lower()}", f"grep -rl --include='*.txt' {word} . | xargs mv -t {word.lower()}"]
    moved = {f"{word.lower()}/{path.rpartition('/')[2]}": draft.files[path] for path in chosen}
    draft.expected = {**dict.fromkeys(chosen), **moved}


def _sum_column(draft: _Draft) -> None:
    rows = [(draft.rng.choice(("north", "south", "east")), draft.rng.randint(1, 99)) for _ in range(12)]
    path = draft.file("sales.csv", "region,amount\n" + "".join(f"{region},{amount}\n" for region, amount in rows))
    region = rows[0][0]
    draft.say = f"Add up the amounts of the region {region} in {path}, and submit the sum."
    draft.gold = [f"awk -F, '$1 == \"{region}\" {{ sum += $2 }} END {{ print sum }}' {path}"]
    draft.answer = str(sum(amount for name, amount in rows if name == region))


def _pack(draft: _Draft) -> None:
    folder = draft.rng.choice(sorted({path.split("/")[0] for path in draft.files if "/" in path}))
    inside = [path for path in draft.files if path.startswith(f"{folder}/")]
    draft.say = f"Pack the folder {folder} into the archive {folder}.tar.gz, and keep the folder."
    draft.gold = [f"tar -czf {folder}.tar.gz {folder}"]
    draft.check = f"mkdir .check && tar -xzf {folder}.tar.gz -C .check && diff -r {folder} .check/{folder}"
    draft.expected = {path: draft.files[path] for path in inside}


def _errors(draft: _Draft) -> None:
    path = draft.file("app.log", _log(draft))
    draft.say = (
        f"Write the modules (the third word of a line) of the ERROR lines of {path} to errors.txt, sorted, once each."
    )
    draft.gold = [f"head -n 3 {path}", f"grep ERROR {path} | cut -d' ' -f3 | sort -u > errors.txt"]
    found = {line.split()[2] for line in draft.text(path).splitlines() if " ERROR " in line}
    draft.expected = texts({"errors.txt": "".join(f"{name}\n" for name in sorted(found))})


FAMILIES: Mapping[str, Callable[[_Draft], None]] = {
    "count_files": _count_files, "rename": _rename, "replace": _replace, "delete": _delete, "collect": _collect,
    "sum_column": _sum_column, "pack": _pack, "errors": _errors,
}  # fmt: skip


def generated(split: str, number: int) -> Task:
    """Task `number` of a split. The families alternate."""
    kind = list(FAMILIES)[number % len(FAMILIES)]
    rng = seeds.generator(0, "terminal", split, str(number))
    draft = _Draft(rng, _tree(rng))
    FAMILIES[kind](draft)
    return Task(
        id=f"terminal-{split}-{number}",
        kind=kind,
        instruction=draft.say,
        files=draft.files,
        gold=commands(*draft.gold, answer=draft.answer or ""),
        answer=draft.answer,
        expected=draft.expected,
        check=draft.check,
    )


def _tree(rng: random.Random) -> dict[str, File]:
    """Some small files in some folders, of which each name occurs once."""
    names = rng.sample(_WORDS, 9)
    suffixes = (".txt", ".txt", ".txt", ".md", ".md", ".log", ".log", ".bak", ".txt")
    lines = {
        f"{rng.choice(('.', *_FOLDERS))}/{name}{suffix}".removeprefix("./"): f"{' '.join(rng.choices(_WORDS, k=4))}\n"
        for name, suffix in zip(names, suffixes, strict=True)
    }
    return texts(lines)


def _log(draft: _Draft) -> str:
    rng, modules = draft.rng, draft.rng.sample(_WORDS, 4)
    lines = [
        f"{hour:02}:{rng.randrange(60):02} {rng.choice(_LEVELS)} {rng.choice(modules)} step {hour}"
        for hour in range(8, 8 + rng.randint(8, 14))
    ]
    return "".join(f"{line}\n" for line in (*lines, f"23:59 ERROR {modules[0]} end"))
