"""Every public case of `turntree traces`, with what is right: what is imported, or which field is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from public_cases import Ran, cases, missing, run_case

pytestmark = missing
FOLDER = "traces-verifiers-audit"
TRACES = cases(FOLDER, "turntree traces")
Check = Callable[[Ran], None]


def refused(field: str | None, *words: str) -> Check:
    """One line that names the field and says these words."""

    def check(ran: Ran) -> None:
        assert ran.code == 2 and not ran.rows
        assert ran.field == field
        assert all(word in ran.error for word in words), ran.error

    return check


def kept(*calls: dict[str, Any], traces: int = 1, turns: int, says: str = "") -> Check:
    """So many traces with so many candidates; all their calls have these arguments, in order."""

    def check(ran: Ran) -> None:
        assert ran.code == 0, ran.error
        assert len(ran.rows) == traces
        assert f" {turns} candidate turn" in ran.stdout and says in ran.stdout
        assert arguments(ran) == list(calls)

    return check


def spoken(ran: Ran) -> list[tuple[str, str, str]]:
    messages = [message for row in ran.rows for message in row["messages"]]
    return [(one["role"], one["content"], one.get("reasoning_content", "")) for one in messages]


def arguments(ran: Ran) -> list[dict[str, Any]]:
    messages = [message for row in ran.rows for message in row["messages"]]
    return [call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ())]


def and_(check: Check, *more: Callable[[Ran], bool]) -> Check:
    def both(ran: Ran) -> None:
        check(ran)
        for one in more:
            assert one(ran), ran.rows

    return both


def skipped(*reasons: str) -> Callable[[Ran], bool]:
    """The turns that a rule or a mark leaves out, of all traces."""
    return lambda ran: [r for row in ran.rows for r in row["meta"].get("skip_turns", {}).values()] == list(reasons)


OSLO = {"city": "Oslo"}
BERGEN = {"city": "Bergen"}
CHECKS: dict[str, Check] = {
    "01_reasoning_part": and_(
        kept(turns=1), lambda ran: spoken(ran)[1] == ("assistant", "51", "SECRET: 17*3 is 51, I should not show this.")
    ),
    "02_thinking_part": and_(kept(turns=1), lambda ran: spoken(ran)[1] == ("assistant", "51", "17*3 = 51")),
    "03_anthropic_blocks": refused("messages[1].content", "'tool_use'", "Anthropic"),
    "71_args_key": refused("messages[1].tool_calls.args", "unknown key"),
    "84_sharegpt_args": refused("messages[1].tool_calls.args", "unknown key"),
    "85_sharegpt_action": refused("messages[1].tool_calls", "no function name"),
    "04_ids_reused": kept(OSLO, BERGEN, turns=3),
    "06_tool_without_id": kept(OSLO, turns=2),
    "08_duplicate_keys": refused("messages[1].tool_calls.arguments", "'city' stands in one object twice"),
    "09_double_encoded": refused("messages[1].tool_calls.arguments", "JSON text inside JSON text"),
    "10_empty_args": kept({}, turns=2),
    "11_tool_calls_text": refused("messages[1].tool_calls", "is not a list"),
    "12_null_filled_args": kept({**OSLO, "expr": None, "zip": None}, turns=2),
    "13_special_tokens": kept(turns=1),
    "14_system_middle": and_(
        kept(turns=2),
        lambda ran: [role for role, *_ in spoken(ran)] == ["system", "user", "assistant"] * 2,
    ),
    "15_image": refused("messages[0].content", "'image_url'"),
    "16_think_in_content": and_(kept(turns=2), lambda ran: spoken(ran)[1][1:] == ("<think>four</think>\n4", "")),
    "17_reasoning_twice": and_(
        kept(turns=1), lambda ran: spoken(ran)[1][1:] == ("<think>\nfour\n</think>\n\n4", "four")
    ),
    "18_reasoning_details": and_(
        refused("messages[1].reasoning_details", "--unknown-keys keep"), lambda ran: "did you mean" not in ran.error
    ),
    "19_json_error_result": and_(
        kept({"city": "Olso"}, OSLO, turns=1), skipped("error_tool_call", "not_a_tool_call")
    ),
    "21_openai_ft": kept(OSLO, turns=1),
    "22_openai_dpo": refused(None, "no known format", "chat", "verifiers"),
    "24_truncated_mid_call": kept(OSLO, BERGEN, OSLO, traces=2, turns=2),
    "26_reward_half": and_(
        kept(traces=2, turns=2), lambda ran: [row["success"] for row in ran.rows] == [False, True]
    ),
    "27_mask_keys": refused("messages[1].train", "--unknown-keys keep"),
    "29_toolbench": kept(turns=1, says="1 result_without_call"),
    "30_glaive": refused(None, "no known format"),
    "31_xlam": refused(None, "no known format"),
    "33_apigen": kept(OSLO, turns=2),
    "34_tool_call_in_text": kept(turns=1, says="1 result_without_call"),
    "60_two_agents": and_(
        kept(turns=1, says="1 after_assistant"),
        lambda ran: [one.get("name") for one in ran.rows[0]["messages"]] == [None, "planner", "writer"],
    ),
    "61_mini_swe_agent": refused("info", "--unknown-keys keep"),
    "62_custom_tool_call": refused("messages[1].tool_calls", "'custom'"),
    "63_openrouter": and_(kept(OSLO, turns=2), lambda ran: spoken(ran)[1] == ("assistant", "", "look")),
    "65_prefix": refused("messages[1].prefix"),
    "66_empty_name": kept({}, turns=1, says="1 unnamed_call"),
    "68_nan_args": refused("messages[1].tool_calls.arguments", "NaN"),
    "69_langchain_roles": refused("messages[0].role", "'human'", "'user'"),
    "70_langchain_types": refused("messages[0].type"),
    "72_input_schema": and_(
        kept(OSLO, turns=2),
        lambda ran: ran.rows[0]["tools"][0]["function"]["parameters"]["required"] == ["city"],
        lambda ran: "input_schema" not in ran.rows[0]["tools"][0]["function"],
    ),
    "74_xlam_types": refused("tools[0].function.parameters", "city, days"),
    "75_sharegpt_call_list": kept(OSLO, BERGEN, turns=1, says="1 unanswered_call"),
    "77_think_tool_loop": kept(OSLO, turns=2),
    "78_think_unclosed": kept(traces=2, turns=2),
    "91_commentary_channel": refused("messages[1].channel"),
    "92_tools_names": refused("tools[0]", "is str"),
    "94_same_content_other_reward": and_(
        kept(traces=2, turns=2), lambda ran: [row["success"] for row in ran.rows] == [False, True]
    ),
    "95_export_mix": kept(OSLO, BERGEN, {"city": "x", "n": 12345678901234567890}, {"city": "x"}, traces=5, turns=8),
    "101_atif_image": refused("messages[0].content", "'image'"),
    "103_chat_messages_dict": refused("messages", "is dict, not a list"),
    "104_empty_messages": refused("messages", "no assistant turn"),
    "105_only_tool_history": refused(None, "1 no_prompt"),
    "106_tools_list_of_texts": refused("tools[0]", "is str"),
    "108_smolagents_roles": refused("messages[3].role", "'tool-call'"),
    "109_hermes_args_text": kept(OSLO, turns=2),
    "111_sharegpt_two_calls_text_between": kept(OSLO, BERGEN, turns=2),
    "112_both_call_forms": kept(OSLO, turns=2, says="function_call that is one of tool_calls"),
    "113_score_key": refused("score"),
    "114_weight_merge": refused(None, "marked_not_trained"),
    "115_cot_in_tool_call_text": kept(OSLO, turns=1, says="1 empty_turn"),
    "116_null_optional_args": kept({**OSLO, "days": None}, turns=2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_a_case_is_imported_right_or_refused_with_its_field(name: str, tmp_path: Path) -> None:
    CHECKS[name](run_case(FOLDER, TRACES[name], tmp_path))


def test_no_case_is_without_a_check() -> None:
    assert TRACES.keys() == CHECKS.keys()
