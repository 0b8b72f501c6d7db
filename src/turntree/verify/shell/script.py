"""Shell scripts by their meaning: parsed words instead of characters.

`Script.of(text)` parses with tree-sitter's bash grammar and makes a value that is equal for scripts which do the same:
quotes that change nothing, comments, spacing, line ends, `;` against a new line, the place of redirections, `2>&1` that
leads to where stdout goes anyway, options in another order where `commands` knows the command. Everything else is
another script. What does not parse is compared as text.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turntree.core.errors import InputError
from turntree.verify.shell.commands import meaning, path

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Canonical = Any  # nested tuples of texts

_ASSIGNMENT_IDLE = frozenset({"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"})
_REDIRECTS = frozenset({"file_redirect", "herestring_redirect", "heredoc_redirect"})
_SEPARATORS = frozenset({";", "\n"})
_LOOPS = frozenset({"for_statement", "while_statement"})  # of every kind
_GLOB = frozenset("*?[]{}")
_QUOTES = frozenset("'\"\\")
_NEEDS_BARE = frozenset("[{~")
_HEREDOC = {"<<", "<<-", "heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor", "file_redirect"}
# read only (without redirections to files)
HARMLESS = {"ls", "cat", "head", "tail", "grep", "egrep", "fgrep", "rg", "pwd", "wc", "which", "stat", "du", "df"}
HARMLESS |= {"echo", "whoami", "uname", "printenv"}
_RUNS_MORE = ("--pre", "--hostname-bin")  # of rg: runs another command
_MOVES = {"pushd", "popd", "eval", "source", ".", "builtin", "command", "time"}  # after these the folder is not known
_REDEFINES = {"alias", "trap", "set", "shopt", "enable", "hash"}  # and after these nothing is what it is called
_MISREAD = re.compile(r"\\(?:[ \t]|\Z)|\r")  # an escaped space is lost by the grammar, and so is a carriage return
_BACK = re.compile(r"\bcd\s+-(?![\w-])|OLDPWD|~-")  # to the folder where the shell was before
_LEADS_AWAY = re.compile(r">(?!&\d|\s*/dev/null\b)")  # of a redirection: stdout or stderr goes to a file
_OPENING_ENDS = re.compile(rb"[ \t]*\n")  # the rest of the line that opens a here-document
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
    `runs`: the names of the commands in order."""

    meaning: Canonical
    destroys: frozenset[Canonical]
    runs: tuple[str, ...]
    parsed: bool

    @property
    def only_reads(self) -> bool:
        """Whether it surely changes nothing, so that its place among other calls does not matter."""
        return self.parsed and not self.destroys and HARMLESS.issuperset(self.runs)

    @staticmethod
    def of(text: str, folder: str | None = None) -> Script:
        """`folder`: where the script starts, if that is known."""
        return _remembered(text, folder) if len(text) <= _REMEMBERED else Script._read(text, folder)

    @staticmethod
    def _read(text: str, folder: str | None) -> Script:
        unsure = len(text) > _LONGEST or _MISREAD.search(text) is not None
        root = None if unsure else _parser().parse(text.encode(errors="surrogatepass")).root_node
        if root is not None and not root.has_error:
            reader = _Reader(folder, goes_back=_BACK.search(text) is not None)
            with contextlib.suppress(RecursionError, _Unsure):  # nested too deeply to be read, or misread
                return Script(tuple(reader.steps(root)), frozenset(reader.destroys), tuple(reader.runs), True)
        stripped = text.strip("\n")
        stripped = text if stripped.endswith("\\") else stripped
        destroys = frozenset({("text", stripped)}) if _DESTROYS.search(stripped) else frozenset[Canonical]()
        return Script(("text", stripped), destroys, (), False)


@functools.lru_cache(maxsize=8192)
def _remembered(text: str, folder: str | None) -> Script:
    return Script._read(text, folder)  # pyright: ignore[reportPrivateUsage]


@functools.cache
def _parser() -> Parser:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        hint = "pip install tree-sitter tree-sitter-bash"
        raise InputError("comparing shell commands needs tree-sitter-bash", field="verifier", hint=hint) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class _Reader:
    """One pass over a syntax tree. Scripts of one line are the common case, so nothing is done twice."""

    def __init__(self, folder: str | None, *, goes_back: bool) -> None:
        self.folder, self.goes_back = folder, goes_back
        self.redefined = False  # whether a function or an alias may stand behind any name
        self.captured = False  # whether stdout leads elsewhere than to the terminal
        self.destroys: set[Canonical] = set()
        self.runs: list[str] = []

    # statements

    def steps(self, node: Node) -> list[Canonical]:
        """The statements of a program or block. A step into the folder that one is in does nothing."""
        found: list[Canonical] = []
        end = -1
        for child in node.children:
            kind, glued, end = child.type, child.start_byte == end, child.end_byte
            if kind == "comment" and glued:
                raise _Unsure  # `a#b` is a word
            if kind in _SEPARATORS or kind == "comment":
                continue
            if kind == "&":
                _to_background(found)
                continue
            found.append(self._step(child))
        return [one for one in found if not isinstance(one, _Nothing)]

    def _step(self, node: Node) -> Canonical:
        """A statement; one in the background leaves the shell where it is."""
        before, after = self.folder, node.next_sibling
        said = self.statement(node)
        if after is not None and after.type == "&":
            self.folder = before
        return said

    def inside(self, node: Node, *, captured: bool) -> tuple[Canonical, ...]:
        """The statements of a block. `captured`: what they print leads elsewhere."""
        before, self.captured = self.captured, self.captured or captured
        found = tuple(self.steps_within(node))
        self.captured = before
        return found

    def statement(self, node: Node, *, piped: bool = False) -> Canonical:
        kind = node.type
        if kind == "command":
            return self.command(node, [], piped)
        if kind == "redirected_statement":
            return self.redirected(node, piped)
        if kind == "list":
            return self.chain(node)
        if kind == "pipeline":
            return self.pipeline(node, [], piped)
        if kind in ("subshell", "compound_statement", "command_substitution", "process_substitution", "do_group"):
            outside = self.folder
            children = [child.type for child in node.children]
            inside = self.inside(node, captured=piped or kind.endswith("substitution"))
            self.folder = outside if kind not in ("compound_statement", "do_group") or piped else self.folder
            return kind, children[0], inside
        if kind == "variable_assignment":
            return "set", self.assignment(node)
        before, self.captured = self.captured, self.captured or piped
        said = self.generic(node)
        self.captured = before
        return said

    def steps_within(self, node: Node) -> list[Canonical]:
        """Of a block, without its brackets."""
        found: list[Canonical] = []
        for child in node.children:
            if child.type == "&":
                _to_background(found)
            elif child.is_named and child.type != "comment":
                found.append(self._step(child))
        return [one for one in found if not isinstance(one, _Nothing)]

    def chain(self, node: Node, *, piped: bool = False) -> Canonical:
        """`a && b || c`, flat: both operators bind alike, from the left. A step that does nothing and succeeds is left
        out where `&&` stands on both sides of it. `piped`: what the last command prints leads elsewhere."""
        flat: list[Canonical] = []
        self._flatten(node, flat, self.folder, piped)
        later = [one for one in flat[2:] if isinstance(one, tuple)]
        if any(one[0] == "compound_statement" or (one[0] == "run" and one[2][:1] == ("cd",)) for one in later):
            self.folder = None  # whether it went there depends on what came before
        steps: list[Canonical] = []
        for k, one in enumerate(flat):
            if isinstance(one, _Nothing):
                after = flat[k + 1] if k + 1 < len(flat) else "&&"
                if after == "&&" and (not steps or steps[-1] == "&&"):
                    continue
                one = one.said
            if isinstance(one, _Operator) and (not steps or isinstance(steps[-1], _Operator)):
                continue  # of a step that was left out
            steps.append(one)
        while steps and isinstance(steps[-1], _Operator):
            steps.pop()
        if not steps:
            return flat[0]
        return steps[0] if len(steps) == 1 else ("chain", *steps)

    def _flatten(self, node: Node, into: list[Canonical], start: str | None, piped: bool) -> None:
        if node.type != "list":
            into.append(self.statement(node, piped=piped))
            return
        for child in node.children:
            if child.is_named:
                if child.type != "comment":
                    self._flatten(child, into, start, piped and child == node.children[-1])
                    if "||" in into and self.folder != start:
                        self.folder = None  # whether it went there depends on what came before
            elif child.type in ("&&", "||"):
                into.append(_Operator(child.type))
                if child.type == "||" and self.folder != start:
                    self.folder = None

    def pipeline(self, node: Node, last: list[Canonical], piped: bool) -> Canonical:
        """`last`: redirections that the grammar puts on the whole pipeline, and the shell on its last command."""
        stages = [child for child in node.children if child.is_named and child.type != "comment"]
        joints = [child.type for child in node.children if not child.is_named and child.type in ("|", "|&")]
        found: list[Canonical] = []
        outside = self.folder
        for place, stage in enumerate(stages):
            self.folder = outside  # every stage is a shell of its own
            end = place == len(stages) - 1
            both = not end and joints[place] == "|&"
            more = last if end else [("2", ">&", "1")] if both else []
            goes_on = piped if end else True
            if stage.type == "command":
                found.append(self.command(stage, more, goes_on))
            elif stage.type == "redirected_statement":
                found.append(self.redirected(stage, goes_on, more))
            else:
                found.append(self._with(self.statement(stage, piped=goes_on or bool(more)), more, goes_on))
        self.folder = outside
        return "pipe", *(_unwrapped(one) for one in found)

    # redirections

    def redirected(self, node: Node, piped: bool, outer: list[Canonical] | None = None) -> Canonical:
        body = node.child_by_field_name("body")
        steps = None
        if body is not None and body.type == "list":
            others = (child for child in node.children if child.id != body.id)
            away = any(_LEADS_AWAY.search(_text(child)) for child in others)
            steps = self.chain(body, piped=piped or away)  # it may go to another folder
            last = body.children[-1]
            if last.type == "command" and last.children[0].type == "command_name" and _text(last.children[0]) == "cd":
                raise _Unsure  # the target is opened before the step, which may do nothing else
        redirects = [
            one for child in node.children if body is None or child.id != body.id for one in self.redirects(child)
        ]
        redirects += outer or []
        if body is None:
            return "redirect", tuple(redirects)
        if body.type == "command":
            return self.command(body, redirects, piped)
        if body.type == "pipeline":
            return self.pipeline(body, redirects, piped)
        if body.type == "list":  # the grammar puts them on the whole list, and the shell on its last command
            if isinstance(steps, tuple) and steps[0] == "chain" and isinstance(steps[-1], tuple):
                return (*steps[:-1], self._with(steps[-1], redirects, piped))
            return self._with(steps, redirects, piped)
        outside, before, self.captured = self.folder, self.captured, self.captured or bool(redirects)
        said = self.statement(body, piped=piped)
        self.captured = before
        if redirects and self.folder != outside:
            self.folder = None  # where the redirection fails, nothing in it was run
        return self._with(said, redirects, piped)

    def _with(self, said: Canonical, redirects: list[Canonical], piped: bool) -> Canonical:
        piped = piped or self.captured
        kept = _told(redirects, piped)
        if not kept:
            return said
        said = _unwrapped(said)
        if isinstance(said, tuple) and said and said[0] == "run":
            said = (*said[:3], _told([*said[3], *redirects], piped))
        else:
            said = ("redirected", said, kept)
        if _writes(kept):
            self.destroys.add(said)
        return said

    def redirects(self, node: Node) -> list[Canonical]:
        """A redirection; those on the first line of a here-document stand inside it."""
        if node.type != "heredoc_redirect":
            return [self.redirect(node)]
        parts, body = {child.type: child for child in node.children}, _document(node)
        if not parts.keys() <= _HEREDOC:  # `cat <<EOF | bash`: the grammar puts what follows into the document
            return [self.opaque(node)]
        start, number = (_text(parts[kind]) if kind in parts else "" for kind in ("heredoc_start", "file_descriptor"))
        quoted = not _QUOTES.isdisjoint(start)
        document = ("body", body)
        if "heredoc_body" in parts and not quoted:  # what is expanded in it may run or set something
            document = (self.opaque(parts["heredoc_body"])[0], body)
        if _DESTROYS.search(body):
            self.destroys.add(("text", body))
        said = (number or "0", "<<-" if "<<-" in parts else "<<", (quoted, document))
        return [said, *(self.redirect(child) for child in node.children if child.type == "file_redirect")]

    def redirect(self, node: Node) -> Canonical:
        if node.type != "file_redirect":
            return self.opaque(node)
        number, operator, targets = "", "", list[Canonical]()
        for child in node.children:
            if child.type == "file_descriptor":
                number = _text(child)
            elif not child.is_named:
                operator = child.type
            else:
                targets.append(self.word(child))
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if operator in (">&", "<&") and isinstance(target, str) and (target.isdecimal() or target == "-"):
            return number or ("1" if operator == ">&" else "0"), operator, target
        if isinstance(target, str):
            target = path(target, self.folder)
        if operator in ("&>", ">&"):
            return "&", ">", target
        if operator == "&>>":
            return "&", ">>", target
        operator = ">" if operator == ">|" else operator
        return number or ("0" if operator.startswith("<") else "1"), operator, target

    # commands

    def command(self, node: Node, redirects: list[Canonical], piped: bool) -> Canonical:
        words: list[Canonical] = []
        settings: list[Canonical] = []
        own: list[Canonical] = []
        end = -1
        for child in node.children:
            kind = child.type
            if child.start_byte == end and kind not in _REDIRECTS:
                raise _Unsure  # one word, which the grammar took for two
            end = child.end_byte
            if kind == "variable_assignment":
                settings.append(self.assignment(child))
            elif kind in _REDIRECTS:
                own += self.redirects(child)
            elif kind == "command_name":
                words.append(self.word(child.children[0]))
            else:
                words.append(self.word(child))
        kept = _told([*own, *redirects], piped or self.captured)
        # a value that is expanded may run a command
        acting = tuple(one for one in settings if one[0] not in _ASSIGNMENT_IDLE or not isinstance(one[2], str))
        if not words:
            return "run", acting, (), kept
        name = words[0]
        if name == "cd" and not acting and not kept:
            return self.step(words)
        piped = piped or self.captured or _writes(kept)
        said: Canonical = ("run", acting, meaning(words, self.folder, piped), kept)
        self.runs.append(name if isinstance(name, str) else "?")
        if not isinstance(name, str) or name in _MOVES or name == "cd":
            self.folder = None  # of a `cd` with a redirection or a variable: it may have gone there or not
        if name in _REDEFINES:
            self.folder, self.redefined = None, True
        self.captured = self.captured or name == "exec"  # it may have sent the output of all that follows elsewhere
        if (
            name == "tee"
            or _DESTROYS.search(_text(node))
            or (name == "rg" and any(str(word).startswith(_RUNS_MORE) for word in words))
            or _writes(kept)
        ):
            self.destroys.add(said)
        return said

    def step(self, words: list[Canonical]) -> Canonical:
        """`cd`: into the folder where one is, it does nothing."""
        said = meaning(words, self.folder)
        self.runs.append("cd")
        target = said[-1][0] if len(said) == 3 and said[-1] and isinstance(said[-1][0], tuple) else None
        where = target[0] if target and len(target) == 1 else None
        if self.redefined or not isinstance(where, str) or not where.startswith("/") or ".." in where.split("/"):
            self.folder = None
            return "run", (), said, ()
        stays = self.folder is not None and posixpath.normpath(where) == posixpath.normpath(self.folder)
        if stays and not self.goes_back:
            self.runs.pop()
            return _Nothing(("run", (), said, ()))
        self.folder = where
        return "run", (), said, ()

    def assignment(self, node: Node) -> Canonical:
        name = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        operator = next((child.type for child in node.children if child.type in ("=", "+=")), "=")
        said = "" if value is None else self.word(value)
        self.runs.append("=")
        return ("" if name is None else _text(name)), operator, said

    # words

    def word(self, node: Node) -> Canonical:
        """A text where the shell changes nothing in it; else its parts: ("t", text), ("g", a pattern character),
        ("$", quoted or not, ...)."""
        parts: list[Canonical] = []
        self._parts(node, parts)
        # inside a pattern it matters which characters are quoted: `{a","b}` and `~"root"` are plain text
        quoted = "q" if any(part[0] == "g" and part[1] in _NEEDS_BARE for part in parts) else "t"
        merged: list[Canonical] = []
        for kind, *rest in parts:
            part = (quoted if kind == "q" else kind, *rest)
            if part[0] in ("t", "q") and merged and merged[-1][0] == part[0]:
                merged[-1] = (part[0], merged[-1][1] + part[1])
            elif part not in (("t", ""), ("q", "")):
                merged.append(part)
        if not merged:
            return ""
        return merged[0][1] if len(merged) == 1 and merged[0][0] == "t" else tuple(merged)

    def _parts(self, node: Node, into: list[Canonical], quoted: bool = False) -> None:
        kind = node.type
        if kind in ("word", "number", "special_character", "file_descriptor") and node.child_count == 0:
            _literal(_text(node), into, start=not into)
        elif kind == "raw_string":
            into.append(("q", _text(node)[1:-1]))
        elif kind == "string":
            self._quoted(node, into)
        elif kind == "concatenation":
            for child in node.children:
                self._parts(child, into)
        elif kind == "simple_expansion":
            into.append(("$", quoted, _text(node)[1:]))
        elif kind == "expansion":
            inner = _text(node)[2:-1]
            into.append(("$", quoted, inner) if inner.isidentifier() else ("${", quoted, *self.opaque(node)))
        elif kind in ("command_substitution", "process_substitution"):
            outside = self.folder
            opening = node.children[0].type
            if opening == "`" and "\\" in _text(node):  # the shell takes one layer of them off before it reads the rest
                into.append(("`", quoted, *self.opaque(node)))
                return
            inside = self.inside(node, captured=True)
            self.folder = outside
            into.append(("$(", quoted, "$(" if opening == "`" else opening, inside))
        elif node.child_count == 0:
            _literal(_text(node), into, start=not into) if not node.is_named else into.append((kind, _text(node)))
        else:
            into.append(("?", quoted, self.opaque(node)))

    def _quoted(self, node: Node, into: list[Canonical]) -> None:
        """A string in double quotes; what lies between its parts is text."""
        source, at = node.text or b"", 1
        into.append(("q", ""))
        for child in node.children[1:-1]:
            begin, end = child.start_byte - node.start_byte, child.end_byte - node.start_byte
            if child.type == "string_content" or not child.is_named:
                continue  # text, taken with what lies around it
            into.append(("q", _unescaped(source[at:begin].decode(errors="surrogateescape"))))
            self._parts(child, into, quoted=True)
            at = end
        into.append(("q", _unescaped(source[at:-1].decode(errors="surrogateescape"))))

    # the rest of the language, as it is written

    def generic(self, node: Node) -> Canonical:
        if node.child_count == 0:
            return _text(node)
        if node.type == "c_style_for_statement":
            return self.opaque(node)
        if node.type == "function_definition":
            self.redefined = self.captured = True
            self.folder = None  # it runs where it is called
        outside = self.folder
        if node.type == "declaration_command":
            self.runs.append("=")
        found: list[Canonical] = [node.type]
        for child in node.children:
            if child.type in _SEPARATORS or child.type == "comment":
                continue
            if child.type in ("else_clause", "elif_clause") and self.folder != outside:
                self.folder = None  # whether it went there is what was asked
            if not child.is_named:
                found.append(child.type)
            elif child.type in ("word", "string", "raw_string", "concatenation", "number", "simple_expansion"):
                found.append(("word", self.word(child)))
            else:
                found.append(_unwrapped(self.statement(child)))
        moved, self.folder = self.folder != outside, None  # a loop or a condition may have gone elsewhere
        return self.generic(node) if moved and node.type in _LOOPS else tuple(found)  # and then runs again

    def opaque(self, node: Node) -> Canonical:
        text = _text(node)
        if _DESTROYS.search(text):
            self.destroys.add(("text", text))
        if _runs_or_sets(node):
            self.runs.append("?")
            self.folder = None
        return node.type, text


class _Unsure(Exception):
    """The grammar reads something else than the shell does."""


class _Operator(str):
    """`&&` or `||` between commands."""


@dataclass(frozen=True)
class _Nothing:
    """A step that does nothing and succeeds, and how it is said."""

    said: Canonical


def _to_background(steps: list[Canonical]) -> None:
    said = steps.pop()
    steps.append(said if isinstance(said, _Nothing) else ("&", said))


def _document(node: Node) -> str:
    """The text of a here-document, from the line below its opening to its end. The grammar leaves out the white space
    at its beginning and takes an indented end for one, which the shell does not."""
    *before, end = [child for child in node.children if child.type != "heredoc_body"]
    source, first = node.text or b"", before[-1].end_byte - node.start_byte
    found = _OPENING_ENDS.match(source, first)
    text = (
        "" if found is None else source[found.end() : end.start_byte - node.start_byte].decode(errors="surrogateescape")
    )
    last = text.rpartition("\n")[2]
    if found is None or end.type != "heredoc_end" or (last.strip("\t") if before[0].type == "<<-" else last):
        raise _Unsure
    return text


def _writes(redirects: tuple[Canonical, ...]) -> bool:
    """Whether one of them leads into a file."""
    return any(one[1] in (">", ">>", "<>") and one[2] != "/dev/null" for one in redirects if len(one) == 3)


def _runs_or_sets(node: Node) -> bool:
    """Whether what is compared as text runs a command or sets a variable."""
    left = [node]
    while left:
        node = left.pop()
        if node.type in ("command", "variable_assignment", "=", ":=", "++", "--", "+=", "-="):
            return True
        left += node.children
    return False


def _unwrapped(said: Canonical) -> Canonical:
    return said.said if isinstance(said, _Nothing) else said


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="surrogateescape")


def _literal(text: str, into: list[Canonical], *, start: bool) -> None:
    """A bare word: backslashes taken off, patterns and a tilde at its beginning kept apart."""
    if not ("\\" in text or "~" in text or not _GLOB.isdisjoint(text)):
        into.append(("t", text))
        return
    plain, k = "", 0
    while k < len(text):
        character = text[k]
        if character == "\\" and k + 1 < len(text):
            into.append(("t", plain))
            into.append(("q", "" if text[k + 1] == "\n" else text[k + 1]))
            plain = ""
            k += 2
            continue
        if character in _GLOB or (character == "~" and (text[k - 1] in ":=" if k else start)):
            into.append(("t", plain))
            into.append(("g", character))
            plain = ""
        else:
            plain += character
        k += 1
    into.append(("t", plain))


def _unescaped(text: str) -> str:
    """Inside double quotes a backslash takes the meaning off four characters, and joins lines."""
    return re.sub(r'\\([\\"$`\n])', lambda found: "" if found[1] == "\n" else found[1], text) if "\\" in text else text


def _told(redirects: list[Canonical], piped: bool) -> tuple[Canonical, ...]:
    """Redirections in order, those that change nothing taken off: stderr to where stdout goes anyway."""
    spread: list[Canonical] = []
    for one in redirects:
        if one[0] == "&":
            spread += [("1", one[1], one[2]), ("2", ">&", "1")]
        else:
            spread.append(one)
    kept: list[Canonical] = []
    for one in spread:
        moved = any(before[0] in ("1", "2") for before in kept)
        if one == ("2", ">&", "1") and not piped and not moved:
            continue
        kept.append(one)
    if all(len(one) == 3 and "&" not in one[1] for one in kept) and len({one[0] for one in kept}) == len(kept):
        kept.sort(key=repr)  # files apart from one another: in any order
    return tuple(kept)
