"""Shell scripts by their meaning: parsed words instead of characters.

`Script.of(text)` parses with tree-sitter's bash grammar and makes a value that is equal for scripts which do the same:
quotes that change nothing, comments, spacing, line ends, `;` against a new line, the place of redirections, `2>&1` that
leads to where stdout goes anyway, options in another order where `commands` knows the command. Everything else is
another script. What does not parse is compared as text.

Where a relative path leads is known in a shell that stays in the folder where it starts, or whose first command is a
`cd` to a fixed folder and that stays there. Everywhere else paths count as they are written.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from turntree.verify.shell.commands import meaning, path
from turntree.verify.shell.words import Canonical, Unsure, document, text_of, word

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_ASSIGNMENT_IDLE = frozenset({"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"})
_REDIRECTS = frozenset({"file_redirect", "herestring_redirect", "heredoc_redirect"})
_SHELLS = frozenset({"subshell", "command_substitution", "process_substitution", "pipeline"})  # of their own
_BLOCKS = frozenset({"subshell", "compound_statement", "command_substitution", "process_substitution", "do_group"})
_WORDS = frozenset({"word", "string", "raw_string", "concatenation", "number", "simple_expansion"})
_HEREDOC = {"<<", "<<-", "heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor", "file_redirect"}
_SETS = frozenset({"command", "variable_assignment", "=", ":=", "++", "--", "+=", "-="})  # in what is compared as text
# read only (without redirections to files)
HARMLESS = {"ls", "cat", "head", "tail", "grep", "egrep", "fgrep", "rg", "pwd", "wc", "which", "stat", "du", "df"}
HARMLESS |= {"echo", "whoami", "uname", "printenv"}
_RUNS_MORE = ("--pre", "--hostname-bin")  # of rg: runs another command
_MOVES = {"cd", "pushd", "popd", "eval", "source", ".", "builtin", "command", "time"}  # may lead to another folder
_REDEFINES = {"alias", "trap", "set", "shopt", "enable", "hash"}  # after these nothing is what it is called
_MISREAD = re.compile(r"\\(?:[ \t]|\Z)|\r")  # an escaped space is lost by the grammar, and so is a carriage return
_BACK = re.compile(r"\bcd\s+-(?![\w-])|OLDPWD|~-")  # to the folder where the shell was before
_LONGEST = 20_000  # characters; a longer script is compared as text: damaged ones take quadratic time to parse
_REMEMBERED = 2_000  # characters; what is read of a longer one is not kept
_DESTROYS = re.compile(
    r"(?<![\w.-])(rm|rmdir|shred|unlink|mkfs(\.\w+)?|dd|truncate|wipefs|fdisk|kill|pkill|killall|shutdown|reboot|poweroff"
    r"|dropdb|userdel|chown|chmod|mv|uninstall|purge|remove|prune|delete|-delete|reset|clean|restore|revert|--force|--hard"
    r"|push|stash|DROP|TRUNCATE|DELETE|rmtree|os\.remove|unlinkSync|checkout|overwrite)(?![\w-])",
)


@dataclass(frozen=True)
class Script:
    """What a script does. `destroys`: those of its commands that may destroy something, in their canonical form;
    `runs`: the names of the commands."""

    meaning: Canonical
    destroys: frozenset[Canonical]
    runs: frozenset[str]
    parsed: bool

    @property
    def only_reads(self) -> bool:
        """Whether it surely changes nothing, so that its place among other calls does not matter."""
        return self.parsed and not self.destroys and HARMLESS.issuperset(self.runs)

    @staticmethod
    def of(text: str, folder: str | None = None) -> Script:
        """`folder`: where the script starts, if that is known."""
        return _remembered(text, folder) if len(text) <= _REMEMBERED else _read(text, folder)


def _read(text: str, folder: str | None) -> Script:
    unsure = len(text) > _LONGEST or _MISREAD.search(text) is not None
    root = None if unsure else _parser().parse(text.encode(errors="surrogatepass")).root_node
    if root is not None and not root.has_error:
        folder = posixpath.normpath(folder) if folder and ".." not in folder.split("/") else folder
        reader = _Reader(folder, folder, goes_back=_BACK.search(text) is not None)
        with contextlib.suppress(RecursionError, Unsure):  # nested too deeply to be read, or misread
            steps = reader.shell(root).steps(root)
            return Script(steps, frozenset(reader.destroys), frozenset(reader.runs), True)
    stripped = text.strip("\n")
    stripped = text if stripped.endswith("\\") else stripped
    destroys = frozenset({("text", stripped)}) if _DESTROYS.search(stripped) else frozenset[Canonical]()
    return Script(("text", stripped), destroys, frozenset(), False)


_remembered = functools.lru_cache(maxsize=8192)(_read)


@functools.cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


@dataclass(frozen=True)
class _Reader:
    """Reads the syntax tree of one shell: a script, a subshell, a substitution, a stage of a pipeline."""

    start: str | None  # the folder where the shell starts, None where it is not known
    folder: str | None  # the folder where its commands run
    captured: bool = False  # whether stdout leads elsewhere than to the terminal
    redefined: bool = False  # whether a function or an alias may stand behind any name
    goes_back: bool = False  # whether the script may return to the folder before
    destroys: set[Canonical] = field(default_factory=set[Canonical])
    runs: set[str] = field(default_factory=set[str])

    def shell(self, node: Node, *, captured: bool = False) -> _Reader:
        """The reader of a shell of its own that runs `node`, by what its commands do to the folder and to stdout."""
        commands = [(child, _name(child)) for child in _commands(node)]
        names = {name for _, name in commands}
        redefined = self.redefined or None in names or not _REDEFINES.isdisjoint(names)
        captured = captured or self.captured or "exec" in names or None in names  # may send what follows elsewhere
        start = folder = None
        moves = [child for child, name in commands if name == "" or name in _MOVES]
        if not redefined:
            targets = {_target(child, self.folder) for child in moves}
            if targets <= {self.folder}:
                start = folder = self.folder
            elif moves == [_first(node)] and None not in targets:
                start, folder = self.folder, targets.pop()
        return replace(self, start=start, folder=folder, captured=captured, redefined=redefined)

    # statements

    def steps(self, node: Node) -> tuple[Canonical, ...]:
        """The statements of a script or a block. A step into the folder that one is in does nothing."""
        steps: list[Canonical] = []
        end = -1
        for child in node.children:
            glued, end = child.start_byte == end, child.end_byte
            if child.type == "comment":
                if glued:
                    raise Unsure  # `a#b` is a word
            elif child.type == "&" and steps:
                steps.append(("&", steps.pop()))
            elif child.is_named:
                after = child.next_sibling
                if not self._stays(child) or (after is not None and after.type == "&"):
                    steps.append(self.statement(child))
        return tuple(steps)

    def statement(self, node: Node, redirects: Sequence[Canonical] = ()) -> Canonical:
        """`redirects`: those around it, which the grammar puts on a whole list or pipeline, and the shell on its last
        command."""
        kind = node.type
        if kind == "command":
            return self.command(node, redirects)
        if kind == "redirected_statement":
            body = node.child_by_field_name("body")
            own = [each for child in node.children if child != body for each in self.redirects(child)]
            if body is None:
                return self._with(("run", (), (), ()), [*own, *redirects])
            return self.statement(body, [*own, *redirects])
        if kind == "list":
            return self.chain(node, redirects)
        if kind == "pipeline":
            return self.pipeline(node, redirects)
        inner = replace(self, captured=True) if redirects else self
        if kind in _BLOCKS:
            inner = inner.shell(node, captured=kind.endswith("substitution")) if kind in _SHELLS else inner
            read: Canonical = (kind, node.children[0].type, inner.steps(node))
        else:
            read = ("set", self.assignment(node)) if kind == "variable_assignment" else inner.other(node)
        return self._with(read, redirects)

    def chain(self, node: Node, redirects: Sequence[Canonical]) -> Canonical:
        """`a && b || c`, flat: both operators bind alike, from the left. A step that does nothing and succeeds is left
        out where `&&` stands on both sides of it."""
        flat = list(_flat(node))
        steps: list[Canonical] = []
        for k in range(0, len(flat), 2):
            last = k + 1 >= len(flat)
            before, after = flat[k - 1].type if steps else "&&", "&&" if last else flat[k + 1].type
            outer = redirects if last else ()
            if before == after == "&&" and not outer and self._stays(flat[k]):
                continue
            steps += [before, self.statement(flat[k], outer)]
        return ("chain", *steps[1:]) if len(steps) != 2 else steps[1]

    def pipeline(self, node: Node, redirects: Sequence[Canonical]) -> Canonical:
        stages = [child for child in node.children if child.is_named and child.type != "comment"]
        joints = [child.type for child in node.children if child.type in ("|", "|&")]
        found: list[Canonical] = []
        for stage, joint in zip(stages, [*joints, ""], strict=True):
            outer = {"|&": [("2", ">&", "1")], "": redirects}.get(joint, [])
            reader = replace(self, captured=self.captured or joint != "")
            reader = reader if stage.type in _SHELLS else reader.shell(stage)
            found.append(reader.statement(stage, outer))
        return "pipe", *found

    def other(self, node: Node) -> Canonical:
        """The rest of the language, as it is written."""
        if node.child_count == 0:
            return text_of(node)
        if node.type == "c_style_for_statement":
            return self.opaque(node)
        if node.type == "declaration_command":
            self.runs.add("=")
        found: list[Canonical] = [node.type]
        for child in node.children:
            if child.type in (";", "\n", "comment"):
                continue
            if not child.is_named:
                found.append(child.type)
            else:
                found.append(("word", self.word(child)) if child.type in _WORDS else self.statement(child))
        return tuple(found)

    def opaque(self, node: Node) -> Canonical:
        text, left = text_of(node), [node]
        if _DESTROYS.search(text):
            self.destroys.add(("text", text))
        while left:
            child = left.pop()
            if child.type in _SETS:
                self.runs.add("?")
            left += child.children
        return node.type, text

    # commands

    def command(self, node: Node, outer: Sequence[Canonical]) -> Canonical:
        words, settings, own = list[Canonical](), list[Canonical](), list[Canonical]()
        end = -1
        for child in node.children:
            if child.start_byte == end and child.type not in _REDIRECTS:
                raise Unsure  # one word, which the grammar took for two
            end = child.end_byte
            if child.type == "variable_assignment":
                settings.append(self.assignment(child))
            elif child.type in _REDIRECTS:
                own += self.redirects(child)
            else:
                words.append(self.word(child.children[0] if child.type == "command_name" else child))
        redirects = _effective([*own, *outer], self.captured)
        # a value that is expanded may run a command
        acting = tuple(each for each in settings if each[0] not in _ASSIGNMENT_IDLE or not isinstance(each[2], str))
        name = words[0] if words else "="
        folder = self.start if name == "cd" else self.folder
        does = meaning(words, folder, self.captured or _writes(redirects)) if words else ()
        read: Canonical = ("run", acting, does, redirects)
        self.runs.add(name if isinstance(name, str) else "?")
        runs_more = name == "rg" and any(str(each).startswith(_RUNS_MORE) for each in words)
        if name == "tee" or runs_more or _DESTROYS.search(text_of(node)) or _writes(redirects):
            self.destroys.add(read)
        return read

    def assignment(self, node: Node) -> Canonical:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        operator = next((child.type for child in node.children if child.type in ("=", "+=")), "=")
        self.runs.add("=")
        return ("" if name is None else text_of(name)), operator, "" if value is None else self.word(value)

    def word(self, node: Node) -> Canonical:
        return word(node, self.expand)

    def expand(self, node: Node) -> Canonical:
        opening = node.children[0].type
        if node.type not in _SHELLS or (opening == "`" and "\\" in text_of(node)):
            return self.opaque(node)  # the shell takes one layer of backslashes off before it reads the rest
        return "$(" if opening == "`" else opening, self.shell(node, captured=True).steps(node)

    def _stays(self, node: Node) -> bool:
        """Whether it is a step into the folder where the shell is anyway."""
        known = self.folder is not None and self.start == self.folder and not self.goes_back
        return known and _name(node) == "cd" and _target(node, self.folder) == self.folder

    # redirections

    def redirects(self, node: Node) -> list[Canonical]:
        """A redirection; those on the first line of a here-document stand inside it."""
        if node.type == "file_redirect":
            return [self.redirect(node)]
        if node.type != "heredoc_redirect":
            return [self.opaque(node)]
        parts, body = {child.type: child for child in node.children}, document(node)
        if not parts.keys() <= _HEREDOC:  # `cat <<EOF | bash`: the grammar puts what follows into the document
            return [self.opaque(node)]
        start, number = (text_of(parts[kind]) if kind in parts else "" for kind in ("heredoc_start", "file_descriptor"))
        quoted = not {"'", '"', "\\"}.isdisjoint(start)
        if "heredoc_body" in parts and not quoted:  # what is expanded in it may run or set something
            self.opaque(parts["heredoc_body"])
        if _DESTROYS.search(body):
            self.destroys.add(("text", body))
        read = (number or "0", "<<-" if "<<-" in parts else "<<", (quoted, body))
        return [read, *(self.redirect(child) for child in node.children if child.type == "file_redirect")]

    def redirect(self, node: Node) -> Canonical:
        number, operator, targets = "", "", list[Canonical]()
        for child in node.children:
            if child.type == "file_descriptor":
                number = text_of(child)
            elif child.is_named:
                targets.append(self.word(child))
            else:
                operator = child.type
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if operator in (">&", "<&") and isinstance(target, str) and (target.isdecimal() or target == "-"):
            return number or ("1" if operator == ">&" else "0"), operator, target
        target = path(target, self.folder) if isinstance(target, str) else target
        if operator in ("&>", ">&", "&>>"):
            return "&", ">>" if operator == "&>>" else ">", target
        return number or ("0" if operator[0] == "<" else "1"), ">" if operator == ">|" else operator, target

    def _with(self, read: Canonical, redirects: Sequence[Canonical]) -> Canonical:
        effective = _effective(redirects, self.captured)
        if not effective:
            return read
        read = ("redirected", read, effective)
        if _writes(effective):
            self.destroys.add(read)
        return read


# the folder of a shell


def _commands(node: Node) -> Iterator[Node]:
    """The commands and functions of one shell, without those of shells inside it."""
    left = [node]
    while left:
        child = left.pop()
        if child.type in ("command", "function_definition"):
            yield child
        left += [each for each in child.children if each.type not in _SHELLS]


def _name(node: Node) -> str | None:
    """The name of a command; "" where the shell computes it, "=" where there is none, None for a function."""
    if node.type != "command":
        return None
    name = next((text_of(child) for child in node.children if child.type == "command_name"), "=")
    return "" if re.search(r"[$`*?{\[]", name) else re.sub(r"[\"'\\]", "", name)


def _target(node: Node, folder: str | None) -> str | None:
    """The folder that a `cd` to a fixed one leads to; None for every other command."""
    if _name(node) != "cd" or len(node.children) != 2 or re.search(r"[$`]", text_of(node)):
        return None
    given = word(node.children[1], text_of)
    target = path(given, folder, is_folder=True)
    fixed = isinstance(target, str) and target.startswith("/") and ".." not in target.split("/") and given[0] != "-"
    return posixpath.normpath(target) if fixed else None


def _first(node: Node) -> Node | None:
    """The command that a script or block begins with, where all that follows runs behind it."""
    if node.type != "program" and node.type not in _BLOCKS:
        return None
    child = next((each for each in node.children if each.is_named and each.type != "comment"), node)
    if child.next_sibling is not None and child.next_sibling.type == "&":
        return None
    body = child.child_by_field_name("body")
    if child.type == "redirected_statement" and body is not None and body.type == "list":
        child = body  # its redirections are of its last command
    while child.type == "list":
        if any(each.type == "||" for each in child.children):
            return None
        child = child.children[0]
    return child


def _flat(node: Node) -> Iterator[Node]:
    """Commands of a list with the operators between them."""
    for child in node.children:
        if child.type == "list":
            yield from _flat(child)
        elif child.type in ("&&", "||") or (child.is_named and child.type != "comment"):
            yield child


# redirections


def _writes(redirects: tuple[Canonical, ...]) -> bool:
    """Whether one of them leads into a file."""
    return any(len(each) == 3 and each[1] in (">", ">>", "<>") and each[2] != "/dev/null" for each in redirects)


def _effective(redirects: Sequence[Canonical], captured: bool) -> tuple[Canonical, ...]:
    """Redirections in order, those that change nothing taken off: stderr to where stdout goes anyway."""
    effective: list[Canonical] = []
    for each in redirects:
        for number, *rest in [("1", *each[1:]), ("2", ">&", "1")] if each[0] == "&" else [each]:
            moved = any(before[0] in ("1", "2") for before in effective)
            if (number, *rest) != ("2", ">&", "1") or captured or moved:
                effective.append((number, *rest))
    apart = len({each[0] for each in effective}) == len(effective)
    if apart and all(len(each) == 3 and "&" not in each[1] for each in effective):
        effective.sort(key=repr)  # files apart from one another: in any order
    return tuple(effective)
