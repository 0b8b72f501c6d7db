"""A bound on what a chat template may compute: jinja's sandbox keeps it from files and names, not from looping."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from turntree.core.errors import InputError

_TEMPLATE = "<template>"  # the file name under which jinja compiles a template given as text


class TemplateLoops(InputError):
    """A chat template that does not end, or takes too many steps."""


@contextlib.contextmanager
def at_most(steps: int) -> Iterator[None]:
    """Raises `TemplateLoops` out of a template that runs more than `steps` of its lines inside the block.

    A trace function of this thread counts lines of compiled templates; an earlier trace function (a debugger, a
    coverage tool) is restored afterwards. Rendering takes four times as long meanwhile.
    """
    left = steps

    def in_template(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            problem = f"does not end within {steps:,} steps on a short conversation"
            raise TemplateLoops(problem, field="chat_template", hint="remove the loop from the template")
        return in_template

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return in_template(frame, event, argument) if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
