"""What options of common commands mean, so that `tail -n 20 a` and `tail -20 a` count as one command.

A command without an entry here, or with an option that its entry does not know, is compared word by word in order.
Entries follow the manuals of GNU coreutils, grep, git, pip and pytest. Nothing that changes the outcome is idle.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Word = Any  # a text, or the parts of a word that the shell expands (`shell`)


@dataclass(frozen=True, kw_only=True)
class Command:
    """Short options without and with a value, long ones by the short one that they equal (or by themselves).

    `idle` options change what is printed and not what is done: they count where that goes to another command or a file.
    Options that override one another keep their order (`ordered`: groups of such options, apart by spaces; a group is
    letters, or names apart by commas). The first
    `lead` operands have places of their own; the others are a set (None: all have places) on the terminal, if none lies
    in another. `paths`: operands after those are paths. `prints`: options with which they are printed as they are given
    ("*": always, "2": where there are several), so that their spelling counts where that goes to another command or a
    file. `long` may name a letter, too: `-R` that is `-r`.
    """

    flags: str = ""
    values: str = ""
    long: Mapping[str, str] = field(default_factory=dict[str, str])
    long_values: Mapping[str, str] = field(default_factory=dict[str, str])
    idle: frozenset[str] = frozenset()
    ordered: str = ""
    lead: int | None = None
    lead_given_by: str = ""  # options that take the place of the leading operands (`grep -e PATTERN`)
    paths: bool = False
    prints: str = ""
    number: str = ""  # the option that `-20` stands for
    folder: bool = False  # operands are folders: a slash at the end says nothing
    subcommands: Mapping[str, Command] | None = None

    @functools.cached_property
    def groups(self) -> tuple[frozenset[str], ...]:
        """`ordered`, read."""
        return tuple(frozenset(one.split(",") if "," in one else one) for one in self.ordered.split())


_ALWAYS_IDLE = frozenset({"x", "maxfail", "no-pager", "no-input", "no-color"})  # of idle options, in a pipe too
_LONG_LS = {"--all": "a", "--almost-all": "A", "--human-readable": "h", "--recursive": "R", "--reverse": "r"}
_GREP = Command(
    flags="rRniIlLvwxcohHsqEFPGzZaUT",
    values="eABCmf",
    long={
        "--recursive": "r",
        "--line-number": "n",
        "--ignore-case": "i",
        "--files-with-matches": "l",
        "--invert-match": "v",
        "--word-regexp": "w",
        "--count": "c",
        "--extended-regexp": "E",
        "--fixed-strings": "F",
        "--perl-regexp": "P",
        "--only-matching": "o",
        "--no-filename": "h",
        "--with-filename": "H",
        "--quiet": "q",
        "--color": "color",
        "--colour": "color",
    },
    long_values={
        "--include": "include",
        "--exclude": "exclude",
        "--exclude-dir": "exclude-dir",
        "--after-context": "A",
        "--before-context": "B",
        "--context": "C",
        "--max-count": "m",
        "--regexp": "e",
        "--file": "f",
    },
    idle=frozenset({"color"}),
    ordered="EFPG hH rR lL include,exclude",  # a file that both match: the last one decides
    lead=1,
    lead_given_by="ef",
    paths=True,
    prints="2rRlLH",
)
_PIP_LONG = {
    "--upgrade": "U",
    "--quiet": "q",
    "--verbose": "v",
    "--yes": "y",
    "--user": "user",
    "--no-deps": "no-deps",
    "--pre": "pre",
    "--force-reinstall": "force-reinstall",
    "--no-cache-dir": "no-cache-dir",
    "--no-input": "no-input",
    "--disable-pip-version-check": "disable-pip-version-check",
    "--break-system-packages": "break-system-packages",
}
_PIP = Command(
    idle=frozenset({"q", "v", "disable-pip-version-check", "no-input"}),
    subcommands={
        "install": Command(
            flags="qvU",
            values="re",
            long=_PIP_LONG,
            idle=frozenset({"q", "v", "no-input", "disable-pip-version-check"}),
            long_values={"--requirement": "r", "--editable": "e", "--index-url": "i", "--target": "t"},
            lead=0,
        ),
        "uninstall": Command(
            flags="qvy",
            values="r",
            long=_PIP_LONG,
            idle=frozenset({"q", "v", "no-input", "disable-pip-version-check"}),
            long_values={"--requirement": "r"},
            lead=0,
        ),
        "list": Command(long={"--outdated": "o"}, flags="o", lead=0),
        "show": Command(flags="f", long={"--files": "f"}, lead=0),
        "freeze": Command(lead=0),
    },
)
_PYTEST = Command(
    flags="vqsxl",
    values="kmpnocr",
    long={
        "--verbose": "v",
        "--quiet": "q",
        "--exitfirst": "x",
        "--showlocals": "l",
        "--no-header": "no-header",
        "--no-summary": "no-summary",
        "--lf": "lf",
        "--last-failed": "lf",
        "--ff": "ff",
        "--failed-first": "ff",
        "--collect-only": "co",
        "--co": "co",
        "--disable-warnings": "disable-warnings",
        "--full-trace": "full-trace",
    },
    long_values={
        "--tb": "tb",
        "--color": "color",
        "--capture": "capture",
        "--maxfail": "maxfail",
        "--ignore": "ignore",
        "--deselect": "deselect",
        "--timeout": "timeout",
        "--durations": "durations",
        "--rootdir": "rootdir",
    },
    # what is told, and how soon a failing run ends; which tests run is compared
    idle=frozenset(
        {
            "v",
            "q",
            "s",
            "x",
            "l",
            "r",
            "tb",
            "color",
            "capture",
            "maxfail",
            "no-header",
            "no-summary",
            "durations",
            "disable-warnings",
            "full-trace",
        }
    ),
    lead=0,
    paths=True,
)
_LIST = Command(
    flags="laAhrtRSdF1ionsCxXU",
    long={**_LONG_LS, "--color": "color", "--directory": "d"},
    long_values={"--sort": "sort"},
    idle=frozenset({"color", "F"}),
    ordered="t,S,X,U,sort lC1xno aA",
    lead=0,
    paths=True,
    prints="*",
)
_GIT = Command(
    long={"--no-pager": "no-pager"},
    idle=frozenset({"no-pager"}),
    values="C",
    subcommands={
        "status": Command(
            flags="sb", long={"--short": "s", "--branch": "b", "--porcelain": "porcelain"}, lead=0, paths=True
        ),
        "diff": Command(
            flags="w",
            lead=None,
            ordered="",
            long={
                "--stat": "stat",
                "--cached": "cached",
                "--staged": "cached",
                "--name-only": "name-only",
                "--no-color": "no-color",
                "--color": "color",
                "--name-status": "name-status",
            },
            idle=frozenset({"color", "no-color"}),
        ),
        "log": Command(
            flags="p",
            values="n",
            number="n",
            lead=None,
            long={"--oneline": "oneline", "--stat": "stat", "--all": "all", "--graph": "graph", "--patch": "p"},
            long_values={"--max-count": "n", "--author": "author", "--since": "since", "--grep": "grep"},
        ),
        "add": Command(flags="Aup", long={"--all": "A", "--update": "u", "--patch": "p"}, lead=0, paths=True),
        "rm": Command(
            flags="rfq",
            long={"--cached": "cached", "--force": "f", "--quiet": "q"},
            idle=frozenset({"q"}),
            lead=0,
            paths=True,
        ),
        "commit": Command(
            flags="aqnvs",
            values="mF",
            idle=frozenset({"q", "v"}),
            long={
                "--all": "a",
                "--amend": "amend",
                "--no-verify": "n",
                "--allow-empty": "allow-empty",
                "--quiet": "q",
                "--no-edit": "no-edit",
                "--signoff": "s",
            },
            long_values={"--message": "m", "--file": "F", "--author": "author"},
            lead=0,
            paths=True,
        ),
        "show": Command(flags="", long={"--stat": "stat", "--name-only": "name-only"}, lead=None),
        "branch": Command(flags="avrdD", long={"--all": "a", "--delete": "d"}, lead=None, ordered="dD"),
    },
)
_APT = Command(
    flags="yq",
    long={"--yes": "y", "--quiet": "q", "--no-install-recommends": "no-install-recommends"},
    ordered="q",  # -qq does not ask, as -y
    subcommands={
        name: Command(
            flags="yq",
            long={"--yes": "y", "--quiet": "q", "--no-install-recommends": "no-install-recommends"},
            ordered="q",
            lead=0,
        )
        for name in ("install", "remove", "purge", "update", "upgrade", "autoremove")
    },
)

COMMANDS: Mapping[str, Command] = {
    "ls": _LIST,
    "cat": Command(flags="nbAsvETe", long={"--number": "n"}, paths=True),
    "head": Command(
        flags="qvz",
        values="nc",
        long_values={"--lines": "n", "--bytes": "c"},
        ordered="nc qv",
        number="n",
        paths=True,
        prints="2v",
    ),
    "tail": Command(
        flags="fFqvz",
        values="ncs",
        long={"--follow": "f"},
        long_values={"--lines": "n", "--bytes": "c"},
        ordered="nc fF qv",
        number="n",
        paths=True,
        prints="2v",
    ),
    "grep": _GREP,
    "egrep": _GREP,
    "fgrep": _GREP,
    "rm": Command(
        flags="rRfivdI",
        long={"-R": "r", "--recursive": "r", "--force": "f", "--verbose": "v"},
        idle=frozenset({"v"}),
        ordered="fiI",
        lead=0,
        paths=True,
        prints="v",
    ),
    "rmdir": Command(
        flags="pv",
        long={"--parents": "p", "--verbose": "v"},
        idle=frozenset({"v"}),
        paths=True,
        prints="v",
        folder=True,
    ),
    "mkdir": Command(
        flags="pv",
        values="m",
        long={"--parents": "p", "--verbose": "v"},
        long_values={"--mode": "m"},
        idle=frozenset({"v"}),
        lead=0,
        paths=True,
        prints="v",
        folder=True,
    ),
    "touch": Command(flags="acm", values="dtr", lead=0, paths=True),
    "cp": Command(
        flags="rRafipvnuLPdHT",
        long={"-R": "r", "--recursive": "r", "--force": "f", "--archive": "a", "--verbose": "v"},
        idle=frozenset({"v"}),
        ordered="fin adLPH",
        paths=True,
        prints="v",
    ),
    "mv": Command(
        flags="fivnuT",
        long={"--force": "f", "--verbose": "v"},
        idle=frozenset({"v"}),
        ordered="fin",
        paths=True,
        prints="v",
    ),
    "ln": Command(flags="sfnvrT", long={"--symbolic": "s", "--force": "f"}, idle=frozenset({"v"})),
    "wc": Command(flags="lwcmL", long={"--lines": "l", "--words": "w", "--bytes": "c"}, lead=0, paths=True, prints="*"),
    "sort": Command(
        flags="nrufbdghMRsVz",
        values="kto",
        long={"--reverse": "r", "--unique": "u", "--numeric-sort": "n"},
        ordered="k",
        paths=True,
    ),
    "uniq": Command(flags="cduiz", long={"--count": "c"}),
    "diff": Command(
        flags="urNqwbBia",
        values="U",
        long={"--unified": "u", "--recursive": "r", "--brief": "q"},
        paths=True,
        prints="*",
    ),
    "chmod": Command(flags="Rvf", long={"--recursive": "R"}, idle=frozenset({"v"}), lead=1, paths=True, prints="v"),
    "chown": Command(flags="Rvf", long={"--recursive": "R"}, idle=frozenset({"v"}), lead=1, paths=True, prints="v"),
    "cd": Command(paths=True, folder=True),
    "pwd": Command(),
    "which": Command(flags="a", lead=0),
    "file": Command(flags="bi", ordered="b", lead=0, paths=True, prints="*"),  # a second -b takes the first one back
    "stat": Command(flags="L", values="c", lead=0, paths=True, prints="*"),
    "du": Command(
        flags="shacxm",
        values="d",
        long={"--summarize": "s", "--human-readable": "h"},
        long_values={"--max-depth": "d"},
        ordered="sa hm",
        paths=True,
        prints="*",
    ),
    "df": Command(flags="hTai", long={"--human-readable": "h"}, lead=0, paths=True),
    "tree": Command(flags="adfl", values="LIP", lead=0, paths=True, prints="*"),
    "pytest": _PYTEST,
    "py.test": _PYTEST,
    "pip": _PIP,
    "pip3": _PIP,
    "git": _GIT,
    "apt-get": _APT,
    "apt": _APT,
    "npm": Command(
        subcommands={
            "install": Command(
                flags="DgES", long={"--save-dev": "D", "--global": "g", "--save-exact": "E", "--save": "S"}, lead=0
            ),
            "uninstall": Command(flags="DgS", long={"--save-dev": "D", "--global": "g", "--save": "S"}, lead=0),
            "test": Command(),  # what follows is for another command
        }
    ),
}


def meaning(words: Sequence[Word], folder: str | None, piped: bool = False) -> tuple[Any, ...]:
    """A value that is equal for command lines which do the same. `words[0]` is the command; `folder` is where it runs
    (None: not known), so that a relative path is the absolute one. `piped`: what it prints leads elsewhere than to the
    terminal, where every line of it and their order may decide."""
    name = words[0]
    rest = list(words[1:])
    if name in ("python", "python3") and rest[:2] == ["-m", "pytest"]:
        found = _arguments(_PYTEST, rest[2:], folder, piped)
        return (name, "-m", "pytest", *(found or rest[2:]))
    if name in ("python", "python3") and rest[:2] == ["-m", "pip"]:
        found = _arguments(_PIP, rest[2:], folder, piped)
        return (name, "-m", "pip", *(found or rest[2:]))
    command = COMMANDS.get(name) if isinstance(name, str) else None
    found = None if command is None else _arguments(command, rest, folder, piped)
    if found is None:
        return (name, *rest)
    return ("pip" if name == "pip3" else name, *found)


def _arguments(command: Command, words: list[Word], folder: str | None, piped: bool) -> tuple[Any, ...] | None:
    """Options and operands in a fixed form; None where an option is not known."""
    options: list[tuple[str, Word]] = []
    operands: list[Word] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--" and command.subcommands is None:
            if command.lead is None and not command.paths:  # `git diff -- a`: what follows are paths, and nothing else
                operands.append(word)
            operands += left
            break
        if not isinstance(word, str):
            if word[0][0] == "t" and word[0][1].startswith(
                "-"
            ):  # an option that the shell makes: `-$x`, `--include=*.py`
                if not _expanded(command, word, options):
                    return None
            else:
                operands.append(word)
        elif word.startswith("--"):
            if not _long(command, word, left, options):
                return None
        elif word.startswith("-") and word != "-":
            if not _short(command, word[1:], left, options):
                return None
        elif command.subcommands is not None:
            inner = command.subcommands.get(word)
            if any(name == "C" for name, _ in options):
                folder = None  # `git -C elsewhere`
            found = None if inner is None else _arguments(inner, left, folder, piped)
            return None if found is None else (_sorted(command, options, piped), word, *found)
        else:
            operands.append(word)
    given = {name for name, _ in options}
    return _sorted(command, options, piped), _operands(command, operands, given, folder, piped)


def _long(command: Command, word: str, left: list[Word], options: list[tuple[str, Word]]) -> bool:
    name, equals, value = word.partition("=")
    if name in command.long:
        options.append((command.long[name], value if equals else ""))
        return True
    if name not in command.long_values or not (equals or left):
        return False
    options.append((command.long_values[name], value if equals else left.pop(0)))
    return True


def _expanded(command: Command, word: Word, options: list[tuple[str, Word]]) -> bool:
    """`--include=*.py`: the name is plain, the value is for the shell."""
    text = word[0][1] if word[0][0] == "t" else ""
    name, equals, value = text.partition("=")
    if not equals or name not in command.long_values:
        return False
    # an option's value that no file is called by: GNU tools get it as it is written
    options.append(
        (command.long_values[name], value + "".join(part[1] for part in word[1:]))
        if all(part[0] in "tg" for part in word)
        else (command.long_values[name], (value, *word[1:]))
    )
    return True


def _short(command: Command, letters: str, left: list[Word], options: list[tuple[str, Word]]) -> bool:
    if command.number and letters.isdecimal():
        options.append((command.number, letters))
        return True
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter in command.flags:
            options.append((command.long.get(f"-{letter}", letter), ""))
        elif letter in command.values and (letters or left):
            options.append((letter, letters or left.pop(0)))
            return True
        else:
            return False
    return True


def _sorted(command: Command, options: list[tuple[str, Word]], piped: bool) -> tuple[Any, ...]:
    """Acting options: those that override one another in the order given, then the others by name. In a pipe what is
    printed acts, and how often it is asked for."""
    acting = [one for one in options if one[0] not in command.idle]
    groups = command.groups
    free = [one for one in acting if not any(one[0] in group for group in groups)]
    flags = {one for one in free if one[1] == ""}  # said twice is said once
    valued = sorted((one for one in free if one[1] != ""), key=lambda one: one[0])  # stable: values keep their order
    overriding = tuple(tuple(one for one in acting if one[0] in group) for group in groups)
    printed = [one for one in options if piped and one[0] in command.idle - _ALWAYS_IDLE]
    return overriding, tuple(sorted(flags)), tuple(valued), tuple(sorted(printed, key=lambda one: one[0]))


def _operands(
    command: Command, operands: list[Word], given: set[str], folder: str | None, piped: bool
) -> tuple[Any, ...]:
    lead = command.lead
    if lead and given & set(command.lead_given_by):
        lead = 0
    first = operands if lead is None else operands[:lead]
    rest = [] if lead is None else operands[lead:]
    places = operands if lead is None else rest
    several = len(places) > 1 or not all(isinstance(word, str) for word in places)
    told = set(command.prints) & {"*", *("2" if several else ""), *given}
    if command.paths and not (piped and told):
        rest = [path(word, folder, is_folder=command.folder) for word in rest]
        first = [path(word, folder, is_folder=command.folder) for word in first] if lead is None else first
    return tuple(first), tuple(rest if piped or _nested(rest) else sorted(rest, key=repr))


def _nested(operands: list[Word]) -> bool:
    """Whether one may lie in another, so that their order decides: `rmdir a/b a`, `mkdir a a/b`."""
    texts = [one if isinstance(one, str) else "".join(str(part[-1]) for part in one) for one in operands]
    places = sorted([] if text == "." else text.rstrip("/").split("/") for text in texts)
    return any(len(a) < len(b) and b[: len(a)] == a for a, b in itertools.pairwise(places))


def path(word: Word, folder: str | None, *, is_folder: bool = False) -> Word:
    """A path without `./` and double slashes, from the root where `folder` is known. `..` stays: it may lead through a
    link. So does a last `.`: `dist/.` is what lies in `dist`. Words that the shell expands stay as they are, but for
    their beginning."""
    if not isinstance(word, str):
        first = word[0]
        if folder and (first[0] == "g" or (first[0] == "t" and not first[1].startswith("/"))):
            return (
                (("t", folder.rstrip("/") + "/"), *word)
                if first[0] == "g"
                else (("t", posixpath.join(folder, first[1].removeprefix("./"))), *word[1:])
            )
        return word
    if not word or word == "-" or "://" in word:
        return word
    word, colons, test = word.partition("::")  # of pytest: its name is no path
    if folder and not word.startswith("/"):
        word = posixpath.join(folder, word)
    given = [part for part in word.split("/") if part]
    inside = given[-1:] == ["."]
    slash = word.endswith("/") and not is_folder and not inside
    parts = [part for part in given if part != "."] + ["."] * inside
    plain = ("/" if word.startswith("/") else "") + "/".join(parts)
    return (plain or ".") + ("/" if slash and parts else "") + colons + test
