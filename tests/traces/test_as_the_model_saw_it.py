"""A history is what the model was shown, or the turn behind it is not taught."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from test_importers import imported
from trace_fixtures import FIXTURES, SDK, adds_up

AT = {"exit_code": 1, "working_dir": "/w", "py_interpreter_path": "/py", "prefix": "[Below.]\n", "suffix": "\n[Ended.]"}
ERROR = "[An error occurred during execution.]\n"


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        ({"metadata": AT}, "[Below.]\na\n[Ended.]\n[Current working directory: /w]\n[Python interpreter: /py]\n"
                           "[Command finished with exit code 1]"),
        ({"metadata": {"exit_code": -1, "suffix": "\n[Still runs.]"}}, "a\n[Still runs.]"),
        ({"kind": "FileEditorObservation", "is_error": True}, f"{ERROR}a"),
    ],
)  # fmt: skip
def test_what_openhands_writes_around_a_result_is_in_the_history(seen: dict[str, Any], shown: str) -> None:
    history = copy.deepcopy(SDK["history"])
    history[3]["observation"] |= seen
    [trace], _ = imported(FIXTURES["openhands_events sdk"], json.dumps(SDK | {"history": history}), candidates="turns")
    assert trace.messages[3].content == shown


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"content": [{"type": "text", "text": "a" * 29_990}], "metadata": AT}, "another_prompt"),
        ({"kind": "GrepObservation", "content": [{"type": "text", "text": "a" * 50_001}]}, "another_prompt"),
        ({"kind": "TaskObservation", "task_id": "1", "subagent": "s", "status": "done"}, "another_prompt"),
        ({"kind": "BrowserObservation", "screenshot_data": "AAAA"}, "after_an_image"),
    ],
)
def test_what_openhands_clipped_or_showed_as_an_image_is_not_taught_behind(seen: dict[str, Any], reason: str) -> None:
    history = copy.deepcopy(SDK["history"])
    history[3]["observation"] |= seen
    text = json.dumps(SDK | {"history": history})
    [trace], report = imported(FIXTURES["openhands_events sdk"], text, candidates="turns")
    assert (trace.meta["skip_turns"], report.turns_kept) == ({"1": reason}, 1) and adds_up(report)
