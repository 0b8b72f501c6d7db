"""What runs in a box: it hands out the scratch folder, waits for one program, and becomes it.

It runs alone in its namespaces (`box`), before any code of a policy. The first message are its settings, to
which it answers with a descriptor of the scratch folder; the second is the program. A first byte "+" says that the
program began; what follows is its value.
"""

from __future__ import annotations

import _ast
import _signal  # type: ignore[import-not-found]
import _socket
import atexit
import marshal
import os
import random
import resource
import sys
import types

_NAME = "<program>"
_LINK = 3  # the same number in every box, since programs see it
_OPEN_FILES = 64
_SIGNALS = 256  # that wait at once


def main(link: _socket.socket) -> int:
    settings = _message(link)
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)  # which gives up all capabilities
    sys.path += settings["packages"]
    os.chdir("/tmp")
    for kind, limit in (
        (resource.RLIMIT_NPROC, settings["processes"]),
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["disk_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 1),  # with 0 a host that pipes core dumps to a program would start it
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, _SIGNALS),
    ):
        resource.setrlimit(kind, (limit, limit))
    folder = os.open(".", os.O_RDONLY)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, folder.to_bytes(4, sys.byteorder))
    link.sendmsg([b"."], [rights])
    os.close(folder)
    program = _message(link)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # output before a time limit is shown
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    random.seed(0)  # what a program answers depends on its source only
    os.write(_LINK, b"+")
    if program["language"] == "python":
        return _run_python(program["source"])
    try:
        os.execv("/bin/sh", ["sh", "-c", program["source"]])
    finally:  # it could not be started
        os.write(_LINK, b"-")
    return 127


def _message(link: _socket.socket) -> dict:
    """Eight bytes of length, and a dictionary."""
    size, data = 8, bytearray()
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            sys.exit("hung up")  # the other side has ended
        data += chunk
        if size == 8 == len(data):
            size += int.from_bytes(data, "big")
    return marshal.loads(data[8:])


def _run_python(source: str) -> int:
    """Execute a program in a fresh `__main__`; its exit code. A last line that is an expression is the value."""
    code = 0
    try:
        _execute(source)
    except SystemExit as leaving:
        code = _code_of(leaving)
    except BaseException as error:
        _show(error, source)
        code = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # it may have closed or replaced them
            continue
    return code


def _show(error: BaseException, source: str) -> None:
    import linecache
    import traceback

    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename != _NAME:
        shown = shown.tb_next
    linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)
    traceback.print_exception(type(error), error, shown)


def _execute(source: str) -> None:
    tree: _ast.Module = compile(source, _NAME, "exec", _ast.PyCF_ONLY_AST)  # type: ignore[assignment]
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    space = module.__dict__
    space.update(__builtins__=__builtins__, exit=sys.exit, quit=sys.exit)
    exec(compile(tree, _NAME, "exec"), space)
    if isinstance(last, _ast.Expr):
        value = eval(compile(_ast.Expression(last.value), _NAME, "eval"), space)
        if value is not None:
            left = repr(value).encode("utf-8", "replace")
            while left:
                left = left[os.write(_LINK, left) :]


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    os.dup2(int(sys.argv[1]), _LINK, inheritable=False)
    os.closerange(_LINK + 1, 256)
    os._exit(main(_socket.socket(fileno=_LINK)))
