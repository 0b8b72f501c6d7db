"""Words of a shell script: what is plain text in them, and what the shell expands.

A word is a text where the shell changes nothing in it; else its parts: ("t", text), ("q", text that was quoted beside a
pattern), ("g", a pattern character), ("$", quoted or not, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node

Canonical = Any  # nested tuples of texts
Expand = Callable[["Node"], Canonical]
"""The meaning of what the shell runs or computes inside a word."""

_GLOB = frozenset("*?[]{}~")
_NEEDS_BARE = frozenset("[{~")
_PIECE = re.compile(r"\\(.)|([*?[\]{}~])|([^\\*?[\]{}~]+|\\)", re.DOTALL)
_BARE = frozenset({"word", "number", "special_character", "file_descriptor"})
_OPENING_ENDS = re.compile(rb"[ \t]*\n")  # the rest of the line that opens a here-document


class Unsure(Exception):
    """The grammar reads something else than the shell does."""


def text_of(node: Node) -> str:
    return (node.text or b"").decode(errors="surrogateescape")


def word(node: Node, expand: Expand) -> Canonical:
    parts: list[Canonical] = []
    _read(node, expand, parts, quoted=False)
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


def _read(node: Node, expand: Expand, into: list[Canonical], *, quoted: bool) -> None:
    kind = node.type
    if node.child_count == 0 and (kind in _BARE or not node.is_named):
        _bare(text_of(node), into)
    elif kind == "raw_string":
        into.append(("q", text_of(node)[1:-1]))
    elif kind == "string":
        _quoted(node, expand, into)
    elif kind == "concatenation":
        for child in node.children:
            _read(child, expand, into, quoted=False)
    elif kind == "simple_expansion":
        into.append(("$", quoted, text_of(node)[1:]))
    elif kind == "expansion" and (name := text_of(node)[2:-1]).isidentifier():
        into.append(("$", quoted, name))
    elif node.child_count == 0:
        into.append((kind, text_of(node)))
    else:
        into.append(("?", quoted, expand(node)))


def _bare(text: str, into: list[Canonical]) -> None:
    """Backslashes taken off; patterns, and a tilde where the shell expands it, kept apart."""
    if "\\" not in text and _GLOB.isdisjoint(text):
        into.append(("t", text))
        return
    starts = not into
    for piece in _PIECE.finditer(text):
        escaped, special, rest = piece.groups()
        at = piece.start()
        if escaped is not None:
            into.append(("q", "" if escaped == "\n" else escaped))
        elif special and (special != "~" or (text[at - 1] in ":=" if at else starts)):
            into.append(("g", special))
        else:
            into.append(("t", special or rest))


def _quoted(node: Node, expand: Expand, into: list[Canonical]) -> None:
    """A string in double quotes; what lies between its parts is text."""
    source, at = node.text or b"", 1
    inner = [child for child in node.children[1:-1] if child.is_named and child.type != "string_content"]
    for child in (*inner, None):
        # the grammar may count white space before the closing quote as part of it
        end = len(source) - 1 if child is None else child.start_byte - node.start_byte
        text = source[at:end].decode(errors="surrogateescape")
        # inside double quotes a backslash takes the meaning off four characters, and joins lines
        into.append(("q", re.sub(r'\\([\\"$`\n])', lambda found: found[1].strip("\n"), text)))
        if child is not None:
            _read(child, expand, into, quoted=True)
            at = child.end_byte - node.start_byte


def document(node: Node) -> str:
    """The text of a here-document, from the line below its opening to its end. The grammar leaves out the white space
    at its beginning and takes an indented end for one, which the shell does not."""
    *before, end = [child for child in node.children if child.type != "heredoc_body"]
    source, last_byte = node.text or b"", end.start_byte - node.start_byte
    opening = _OPENING_ENDS.match(source, before[-1].end_byte - node.start_byte)
    text = "" if opening is None else source[opening.end() : last_byte].decode(errors="surrogateescape")
    last = text.rpartition("\n")[2]
    if opening is None or end.type != "heredoc_end" or (last.strip("\t") if before[0].type == "<<-" else last):
        raise Unsure
    return text
