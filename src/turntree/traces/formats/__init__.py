"""One module a source format; each turns a raw row into the one chat-shaped `ChatRow` that the importer builds from.

A format is a part (`core.parts`, kind `trace_formats`): a function `read(row)` of one JSON object of a source file. It
returns a `ChatRow`, a mapping that is a chat row (`formats.chat`), or None for a row that holds no trace.
"""
