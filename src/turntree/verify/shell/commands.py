"""What options of common commands mean, so that `tail -n 20 a` and `tail -20 a` count as one command.

A command without an entry in the table, or with an option that its entry does not know, is compared word by word in
order. Entries follow the manuals of GNU coreutils, grep, git, pip and pytest. Nothing that changes the outcome is idle.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Word = Any  # a text, or the parts of a word that the shell expands (`script`)
Options = list[tuple[str, Word]]

_TABLE = """
ls -laAhrtRSdF1ionsCxXU --all=a --almost-all=A --human-readable=h --recursive=R --reverse=r --color --directory=d
    --sort: idle=F,color ordered=t,S,X,U,sort|lC1xno|aA lead=0 paths prints=*
cat -nbAsvETe --number=n paths
head -qvz -nc: --lines=n: --bytes=c: ordered=nc|qv paths prints=2v number=n
tail -fFqvz -ncs: --follow=f --lines=n: --bytes=c: ordered=nc|fF|qv paths prints=2v number=n
grep,egrep,fgrep -rRniIlLvwxcohHsqEFPGzZaUT -eABCmf: --recursive=r --line-number=n --ignore-case=i
    --files-with-matches=l --invert-match=v --word-regexp=w --count=c --extended-regexp=E --fixed-strings=F
    --perl-regexp=P --only-matching=o --no-filename=h --with-filename=H --quiet=q --color --colour=color --include:
    --exclude: --exclude-dir: --after-context=A: --before-context=B: --context=C: --max-count=m: --regexp=e: --file=f:
    idle=color, ordered=EFPG|hH|rR|lL|include,exclude lead=1 lead_given_by=ef paths prints=2rRlLH
rm -rRfivdI -R=r --recursive=r --force=f --verbose=v idle=v ordered=fiI lead=0 paths prints=v
rmdir -pv --parents=p --verbose=v idle=v paths prints=v folder
mkdir -pv -m: --parents=p --verbose=v --mode=m: idle=v lead=0 paths prints=v folder
touch -acm -dtr: lead=0 paths
cp -rRafipvnuLPdHT -R=r --recursive=r --force=f --archive=a --verbose=v idle=v ordered=fin|adLPH paths prints=v
mv -fivnuT --force=f --verbose=v idle=v ordered=fin paths prints=v
ln -sfnvrT --symbolic=s --force=f idle=v
wc -lwcmL --lines=l --words=w --bytes=c lead=0 paths prints=*
sort -nrufbdghMRsVz -kto: --reverse=r --unique=u --numeric-sort=n ordered=k paths
uniq -cduiz --count=c
diff -urNqwbBia -U: --unified=u --recursive=r --brief=q paths prints=*
chmod -Rvf --recursive=R idle=v lead=1 paths prints=v
chown -Rvf --recursive=R idle=v lead=1 paths prints=v
cd paths folder
pwd
which -a lead=0
file -bi ordered=b lead=0 paths prints=*
stat -L -c: lead=0 paths prints=*
du -shacxm -d: --summarize=s --human-readable=h --max-depth=d: ordered=sa|hm paths prints=*
df -hTai --human-readable=h lead=0 paths
tree -adfl -LIP: lead=0 paths prints=*
pytest,py.test -vqsxl -kmpnocr: --verbose=v --quiet=q --exitfirst=x --showlocals=l --no-header --no-summary --lf
    --last-failed=lf --ff --failed-first=ff --collect-only=co --co --disable-warnings --full-trace --tb: --color:
    --capture: --maxfail: --ignore: --deselect: --timeout: --durations: --rootdir:
    idle=l,q,r,s,v,x,capture,color,disable-warnings,durations,full-trace,maxfail,no-header,no-summary,tb lead=0
    paths
pip,pip3 idle=q,v,disable-pip-version-check,no-input
  pip install -qvU -re: --upgrade=U --quiet=q --verbose=v --yes=y --user --no-deps --pre --force-reinstall
    --no-cache-dir --no-input --disable-pip-version-check --break-system-packages --requirement=r: --editable=e:
    --index-url=i: --target=t: idle=q,v,disable-pip-version-check,no-input lead=0
  pip uninstall -qvy -r: --upgrade=U --quiet=q --verbose=v --yes=y --user --no-deps --pre --force-reinstall
    --no-cache-dir --no-input --disable-pip-version-check --break-system-packages --requirement=r:
    idle=q,v,disable-pip-version-check,no-input lead=0
  pip list -o --outdated=o lead=0
  pip show -f --files=f lead=0
  pip freeze lead=0
git -C: --no-pager idle=no-pager,
  git status -sb --short=s --branch=b --porcelain lead=0 paths
  git diff -w --stat --cached --staged=cached --name-only --no-color --color --name-status idle=color,no-color
  git log -p -n: --oneline --stat --all --graph --patch=p --max-count=n: --author: --since: --grep: number=n
  git add -Aup --all=A --update=u --patch=p lead=0 paths
  git rm -rfq --cached --force=f --quiet=q idle=q lead=0 paths
  git commit -aqnvs -mF: --all=a --amend --no-verify=n --allow-empty --quiet=q --no-edit --signoff=s --message=m:
    --file=F: --author: idle=q,v lead=0 paths
  git show --stat --name-only
  git branch -avrdD --all=a --delete=d ordered=dD
apt-get,apt -yq --yes=y --quiet=q --no-install-recommends ordered=q
  apt-get install,remove,purge,update,upgrade,autoremove -yq --yes=y --quiet=q --no-install-recommends ordered=q
    lead=0
npm
  npm install -DgES --save-dev=D --global=g --save-exact=E --save=S lead=0
  npm uninstall -DgS --save-dev=D --global=g --save=S lead=0
  npm test
"""
"""A line is a command (its names apart by commas), or a subcommand below it; what is indented by four goes on.

-abc        short options without a value; `-abc:` with one
--all=a     a long option, and the short one that it equals (itself without one); `--lines=n:` takes a value
idle        options that change what is printed and not what is done: they count where that goes to another command or
            a file
ordered     groups of options that override one another, so that their order counts
            (both: letters, or names apart by commas)
lead        how many operands have places of their own; the others are a set on the terminal, if none lies in another.
            Without it all have places
lead_given_by   options that take the place of the leading operands (`grep -e PATTERN`)
paths       operands after those are paths
prints      options with which operands are printed as they are given ("*": always, "2": where there are several), so
            that their spelling counts where that goes to another command or a file
number      the option that `-20` stands for
folder      operands are folders: a slash at the end says nothing
"""
_ALWAYS_IDLE = frozenset({"x", "maxfail", "no-pager", "no-input", "no-color"})  # of idle options, in a pipe too


@dataclass(frozen=True)
class Command:
    """An entry of the table: its options by their spelling, each with its short name and whether it takes a value; what
    else it says, by name."""

    options: dict[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])
    says: dict[str, str] = field(default_factory=dict[str, str])
    subcommands: dict[str, Command] = field(default_factory=dict[str, "Command"])

    @classmethod
    def read(cls, entry: str) -> Command:
        command = cls()
        for token in entry.split():
            name, _, value = token.rstrip(":").partition("=")
            if not name.startswith("-"):
                command.says[name] = value
            elif name.startswith("--") or value:
                command.options[name] = value or name[2:], token.endswith(":")
            else:
                command.options.update({f"-{letter}": (letter, token.endswith(":")) for letter in name[1:]})
        return command

    def listed(self, name: str) -> frozenset[str]:
        """What an entry says under a name: letters, or names apart by commas."""
        return _names(self.says.get(name, ""))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split(",") if "," in text else text)


def _read_table() -> dict[str, Command]:
    commands: dict[str, Command] = {}
    for line in _TABLE.replace("\n    ", " ").strip().split("\n"):
        words = line.split(maxsplit=2 if line.startswith("  ") else 1)
        parent = words.pop(0) if line.startswith("  ") else ""
        names, entry = words[0].split(","), words[1] if len(words) > 1 else ""
        (commands[parent].subcommands if parent else commands).update(dict.fromkeys(names, Command.read(entry)))
    return commands


COMMANDS: Mapping[str, Command] = _read_table()
_MODULES = {"pytest", "pip"}  # of `python -m`


def meaning(words: Sequence[Word], folder: str | None, piped: bool = False) -> tuple[Any, ...]:
    """A value that is equal for command lines which do the same. `words[0]` is the command; `folder` is where it runs
    (None: not known), so that a relative path is the absolute one. `piped`: what it prints leads elsewhere than to the
    terminal, where every line of it and their order may decide."""
    name, *rest = words
    known = 0  # words that say which command it is
    if name in ("python", "python3") and len(rest) > 1 and rest[0] == "-m" and rest[1] in _MODULES:
        known = 2
    command = COMMANDS.get(rest[1] if known else name) if isinstance(name, str) else None
    arguments = None if command is None else _arguments(command, rest[known:], folder, piped)
    if arguments is None:
        return (name, *rest)
    return ("pip" if name == "pip3" else name, *rest[:known], *arguments)


def _arguments(command: Command, words: list[Word], folder: str | None, piped: bool) -> tuple[Any, ...] | None:
    """Options and operands in a fixed form; None where an option is not known."""
    options: Options = []
    operands: list[Word] = []
    left = list(words)
    while left:
        word = left.pop(0)
        start = word if isinstance(word, str) else word[0][1] if word[0][0] == "t" else ""
        if word == "--" and not command.subcommands:
            if not command.says.keys() & {"lead", "paths"}:  # `git diff -- a`: what follows are paths, and nothing else
                operands.append(word)
            operands += left
            break
        if start.startswith("-") and word != "-":
            if start.startswith("--"):
                known = _long(command, word, left, options)
            else:
                known = isinstance(word, str) and _short(command, word, left, options)
            if not known:
                return None
        elif command.subcommands and isinstance(word, str):
            if any(name == "C" for name, _ in options):
                folder = None  # `git -C elsewhere`
            inner = command.subcommands.get(word)
            rest = None if inner is None else _arguments(inner, left, folder, piped)
            return None if rest is None else (_sorted(command, options, piped), word, *rest)
        else:
            operands.append(word)
    given = {name for name, _ in options}
    return _sorted(command, options, piped), _operands(command, operands, given, folder, piped)


_BRACES = (("g", "{"), ("g", "}"))  # make several words of one


def _long(command: Command, word: Word, left: list[Word], options: Options) -> bool:
    """`--name`, `--name=value`; also where the value is for the shell: `--include=*.py`."""
    start, rest = (word, ()) if isinstance(word, str) else (word[0][1], word[1:])
    spelling, equals, value = start.partition("=")
    name, takes_value = command.options.get(spelling, ("", False))
    if not name or (rest and not (equals and takes_value)) or (takes_value and not (equals or left)):
        return False
    if takes_value and not equals:
        value = left.pop(0)
    elif all(part[0] in "tg" and part[:2] not in _BRACES for part in rest):  # no file is called by it: GNU tools get it
        value += "".join(part[1] for part in rest)
    else:
        value = (value, *rest)
    options.append((name, value))
    return True


def _short(command: Command, word: str, left: list[Word], options: Options) -> bool:
    letters = word[1:]
    if "number" in command.says and letters.isdecimal():
        options.append((command.says["number"], letters))
        return True
    while letters:
        letter, letters = letters[0], letters[1:]
        name, takes_value = command.options.get(f"-{letter}", ("", False))
        if not name or (takes_value and not (letters or left)):
            return False
        options.append((name, (letters or left.pop(0)) if takes_value else ""))
        if takes_value:
            return True
    return True


def _sorted(command: Command, options: Options, piped: bool) -> tuple[Any, ...]:
    """Acting options: those that override one another in the order given, then the others by name. In a pipe what is
    printed acts, and how often it is asked for."""
    idle = command.listed("idle")
    groups = [_names(group) for group in command.says.get("ordered", "").split("|")]
    acting = [option for option in options if option[0] not in idle]
    overriding = tuple(tuple(option for option in acting if option[0] in group) for group in groups)
    free = [option for option in acting if not any(option[0] in group for group in groups)]
    flags = {option for option in free if option[1] == ""}  # twice is once
    valued = sorted((option for option in free if option[1] != ""), key=lambda option: option[0])  # stable
    printed = [option for option in options if piped and option[0] in idle - _ALWAYS_IDLE]
    return overriding, tuple(sorted(flags)), tuple(valued), tuple(sorted(printed, key=lambda option: option[0]))


def _operands(
    command: Command, operands: list[Word], given: set[str], folder: str | None, piped: bool
) -> tuple[Any, ...]:
    lead = len(operands)  # how many have places of their own
    if "lead" in command.says:
        lead = 0 if given & command.listed("lead_given_by") else int(command.says["lead"])
    first, rest = operands[:lead], operands[lead:]
    places = rest if "lead" in command.says else first
    several = len(places) > 1 or not all(isinstance(word, str) for word in places)
    printed = set(command.says.get("prints", "")) & {"*", *("2" if several else ""), *given}
    if "paths" in command.says and not (piped and printed):
        as_paths = [path(word, folder, is_folder="folder" in command.says) for word in places]
        first, rest = (first, as_paths) if "lead" in command.says else (as_paths, rest)
    return tuple(first), tuple(rest if piped or _nested(rest) else sorted(rest, key=repr))


def _nested(operands: list[Word]) -> bool:
    """Whether one may lie in another, so that their order decides: `rmdir a/b a`, `mkdir a a/b`."""
    texts = [word if isinstance(word, str) else "".join(str(part[-1]) for part in word) for word in operands]
    places = sorted([] if text == "." else text.rstrip("/").split("/") for text in texts)
    return any(len(a) < len(b) and b[: len(a)] == a for a, b in itertools.pairwise(places))


def path(word: Word, folder: str | None, *, is_folder: bool = False) -> Word:
    """A path without `./` and double slashes, from the root where `folder` is known. `..` stays: it may lead through a
    link. So does a last `.`: `dist/.` is what lies in `dist`. Words that the shell expands stay as they are, but for
    their beginning."""
    if not isinstance(word, str):
        kind, text = word[0][:2]
        if folder and kind == "g":
            return ("t", folder.rstrip("/") + "/"), *word
        if folder and kind == "t" and not text.startswith("/"):
            return ("t", posixpath.join(folder, text.removeprefix("./"))), *word[1:]
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
