"""Tool calls that mean the same are paid, whatever they look like; the leaks known from other verifiers are closed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verify.arguments import rules_here
from turntree.verify.tool_call import ToolCallMatch


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def act(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, calls)


def judge(demonstration: Message, action: Message, *tools: dict[str, Any], **options: Any) -> Verdict:
    return ToolCallMatch(**options).judge(TurnState("t", 0, (), demonstration, tools), action)


def reward(expected: Any, found: Any, properties: dict[str, Any], **schema: Any) -> float | None:
    """The reward of one call with the arguments `found` where `expected` was demonstrated."""
    return judge(act(ToolCall("f", expected)), act(ToolCall("f", found)), tool("f", properties, **schema)).reward


class TestNumbers:
    @pytest.mark.parametrize("kind", ["integer", "number", ["number", "null"], ["null", "integer"]])
    def test_declared_numbers_are_compared_by_value(self, kind: Any) -> None:
        assert reward({"x": 1}, {"x": 1.0}, {"x": {"type": kind}}) == 1.0
        assert reward({"x": 0}, {"x": -0.0}, {"x": {"type": kind}}) == 1.0
        assert reward({"x": 1}, {"x": 2.0}, {"x": {"type": kind}}) == 0.0

    def test_integers_too_large_for_floats_stay_apart(self) -> None:
        assert reward({"x": 2**53 + 1}, {"x": float(2**53)}, {"x": {"type": "integer"}}) == 0.0

    @pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {}])
    def test_a_truth_value_is_never_a_number(self, schema: dict[str, Any]) -> None:
        for one, other in itertools.permutations([1, True]):
            assert reward({"x": one}, {"x": other}, {"x": schema}) in (0.0, None)

    @pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"enum": [1, 2]}, {"type": "array"}])
    def test_numbers_without_a_declared_type_are_compared_by_value_too(self, schema: dict[str, Any]) -> None:
        kind = schema.get("type")
        one, other = ({"a": 1}, {"a": 1.0}) if kind == "object" else ([1], [1.0]) if kind == "array" else (1, 1.0)
        assert reward({"x": one}, {"x": other}, {"x": schema}) == 1.0
        assert reward({"x": 1}, {"x": 1.5}, {"x": {}}) == 0.0

    def test_a_number_is_not_its_text(self) -> None:
        assert reward({"x": 1}, {"x": "1"}, {"x": {"type": ["integer", "string"]}}) == 0.0


class TestDefaults:
    DECLARED = {"q": {"type": "string"}, "n": {"type": "integer", "default": 10}}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("one", "other"), list(itertools.permutations([{"q": "a"}, {"q": "a", "n": 10}, {"q": "a", "n": 10.0}], 2))
    )
    def test_saying_the_default_is_saying_nothing(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        assert reward(one, other, self.DECLARED, required=["q"]) == 1.0

    def test_another_value_is_another_call(self) -> None:
        assert reward({"q": "a"}, {"q": "a", "n": 5}, self.DECLARED) == 0.0

    def test_a_required_argument_must_be_there_even_with_a_default(self) -> None:
        assert reward({"q": "a", "n": 10}, {"q": "a"}, self.DECLARED, required=["q", "n"]) == 0.0

    def test_defaults_are_filled_in_at_every_depth(self) -> None:
        inner = {"type": "object", "properties": {"unit": {"type": "string", "default": "C"}, "t": {"type": "number"}}}
        deep = {"steps": {"type": "array", "items": inner}}
        assert reward({"steps": [{"t": 1}]}, {"steps": [{"unit": "C", "t": 1.0}]}, deep) == 1.0
        assert reward({"steps": [{"t": 1}]}, {"steps": [{"unit": "F", "t": 1}]}, deep) == 0.0

    def test_an_optional_argument_without_default_is_not_its_null(self) -> None:
        optional = {"q": {"type": "string"}, "n": {"type": ["integer", "null"]}}
        assert reward({"q": "a"}, {"q": "a", "n": None}, optional) == 0.0


class TestSchemas:
    def test_references_and_alternatives_are_followed(self) -> None:
        schema = {
            "$defs": {
                "Count": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Number"}]},
                "Number": {"type": "number"},
            }
        }
        declared = {"x": {"$ref": "#/$defs/Count"}}
        assert reward({"x": 2}, {"x": 2.0}, declared, **schema) == 1.0
        assert reward({"x": "2"}, {"x": 2.0}, declared, **schema) == 0.0
        assert reward({"x": 2}, {"x": None}, declared, **schema) == 0.0

    def test_all_parts_of_a_schema_count(self) -> None:
        parts = [{"properties": {"x": {"type": "number"}}}, {"properties": {"y": {"type": "number", "default": 0}}}]
        assert reward({"x": 1}, {"x": 1.0, "y": 0}, {}, allOf=parts) == 1.0

    def test_the_declared_draft_is_respected(self) -> None:
        pair = {"p": {"type": "array", "items": [{"type": "number"}, {"type": "string"}]}}
        draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
        assert reward({"p": [1, "a"]}, {"p": [1.0, "a"]}, pair, **draft) == 1.0

    def test_arrays_have_an_order(self) -> None:
        assert reward({"x": [1, 2]}, {"x": [2, 1]}, {"x": {"type": "array"}}) == 0.0

    def test_a_recursive_schema_ends_with_its_value(self) -> None:
        node = {"type": "object", "properties": {"v": {"type": "number"}, "next": {"$ref": "#/$defs/Node"}}}
        declared, more = {"list": {"$ref": "#/$defs/Node"}}, {"$defs": {"Node": node}}
        assert (
            reward({"list": {"v": 1, "next": {"v": 2}}}, {"list": {"next": {"v": 2.0}, "v": 1.0}}, declared, **more)
            == 1.0
        )

    def test_arguments_that_break_the_schema_score_nothing_and_the_reason_names_them(self) -> None:
        demonstrated, found = act(ToolCall("f", {"n": 1})), act(ToolCall("f", {"n": "one"}))
        verdict = judge(demonstrated, found, tool("f", {"n": {"type": "integer"}}))
        assert verdict == Verdict(0.0, "invalid arguments: 'f': n: 'one' is not of type 'integer'", "f")


class TestDemonstrationsThatCannotJudge:
    GOLD = act(ToolCall("f", {"x": 1}))

    @pytest.mark.parametrize(
        ("tools", "why"),
        [
            ([tool("f", {"x": {"type": "string"}})], "x: 1 is not of type 'string'"),
            ([tool("f", {}, required=["y"])], "'y' is a required property"),
            ([tool("g")], "'f' is not declared"),
            ([tool("f", {"x": {"type": "dict"}})], "its parameters are not a JSON schema"),
            ([tool("f", {"x": {"$ref": "#/$defs/None"}})], "which leads nowhere"),
            ([tool("f", {"x": {"$ref": "https://example.org/schema.json"}})], "which leads nowhere"),
            ([tool("f", {"x": {"$ref": "#/properties/x"}})], "its parameters cannot be applied"),
            ([tool("f"), tool("f", {"x": {}})], "its state declares 'f' in two ways"),
            ([{"type": "function", "name": "f"}], "its state declares a tool without a name"),
        ],
    )
    def test_they_give_no_reward_to_any_action(self, tools: list[dict[str, Any]], why: str) -> None:
        for action in (self.GOLD, act(ToolCall("f", {})), act(text="done"), act()):
            verdict = judge(self.GOLD, action, *tools)
            assert verdict.reward is None
            assert verdict.reason.startswith("unjudgeable demonstration: ")
            assert why in verdict.reason

    def test_a_schema_elsewhere_is_never_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fetched: list[object] = []
        monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: fetched.append(a))
        assert judge(self.GOLD, self.GOLD, tool("f", {"x": {"$ref": "http://localhost/a.json"}})).reward is None
        assert fetched == []

    def test_a_pattern_that_takes_endless_time_gives_no_reward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("turntree.verify.arguments.SECONDS", 0.2)
        endless = tool("f", {"x": {"type": "string", "pattern": "^(a+)+$"}})
        verdict = judge(act(ToolCall("f", {"x": "aa"})), act(ToolCall("f", {"x": "a" * 60 + "!"})), endless)
        assert verdict.reward is None and "cannot be applied within 0.2 s" in verdict.reason
        assert judge(act(ToolCall("f", {"x": "aa"})), act(ToolCall("f", {"x": "aa"})), endless).reward == 1.0

    def test_an_empty_demonstration_gives_no_reward(self) -> None:
        assert judge(act(text=" "), act(text=" ")).reward is None


class TestLeaks:
    """Each of these was paid by a published verifier."""

    BASH = tool("bash", {"command": {"type": "string"}}, required=["command"])
    GOLD = act(ToolCall("bash", {"command": "pip install requests"}))

    @pytest.mark.parametrize(
        "action",
        [
            act(ToolCall("bash", {})),
            act(ToolCall("bash", {"command": ""})),
            act(ToolCall("bash", {"command": "pip uninstall requests"})),
            act(ToolCall("bash", {"command": "rm -rf /"})),
            act(ToolCall("bash", {"command": "pip install requests", "background": True})),
            act(ToolCall("shell", {"command": "pip install requests"})),
            act(ToolCall("bash", {"command": "pip install requests"}), ToolCall("bash", {"command": "rm -rf /"})),
            act(*[ToolCall("bash", {"command": "pip install requests"})] * 2),
            act(text="pip install requests"),
            act(text="The task is done."),
            act(text='<tool_call>{"name": "bash"'),
            act(),
        ],
    )
    @pytest.mark.parametrize("messages", ["exact", "any"])
    def test_nothing_but_the_demonstrated_call_is_paid(self, action: Message, messages: str) -> None:
        assert judge(self.GOLD, action, self.BASH, messages=messages).reward == 0.0

    def test_claiming_completion_early_is_another_call(self) -> None:
        done = {"keys": {"type": "string"}, "task_complete": {"type": "boolean", "default": False}}
        assert reward({"keys": "ls"}, {"keys": "ls", "task_complete": True}, done) == 0.0
        assert reward({"keys": "ls"}, {"keys": "ls", "task_complete": False}, done) == 1.0

    def test_negated_text_is_other_text(self) -> None:
        gold = act(text="cancel the order and refund the card")
        assert judge(gold, act(text="do not cancel the order and refund the card")).reward == 0.0


class TestParallelCalls:
    F = tool("f", {"x": {"type": "number", "default": 0}})
    G = tool("g")

    def test_their_order_does_not_matter(self) -> None:
        gold = act(ToolCall("f", {"x": 1}), ToolCall("g", {}))
        assert judge(gold, act(ToolCall("g", {}), ToolCall("f", {"x": 1.0})), self.F, self.G).reward == 1.0

    @pytest.mark.parametrize(
        ("found", "reason"), [([1], "fewer calls"), ([1, 2, 2], "more calls"), ([1, 1], "other arguments")]
    )
    def test_each_must_be_made_as_often_as_demonstrated(self, found: list[int], reason: str) -> None:
        gold = act(ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2}))
        verdict = judge(gold, act(*(ToolCall("f", {"x": x}) for x in found)), self.F, self.G)
        assert (verdict.reward, verdict.reason) == (0.0, reason)

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.sampled_from([{}, {"x": 0}, {"x": 0.0}, {"x": 1}, {"x": 1.0}]), min_size=1, max_size=4),
        st.lists(st.sampled_from([{}, {"x": 0}, {"x": 1.0}, {"x": 1}, {"x": 2}]), max_size=4),
    )
    def test_they_are_accepted_exactly_when_some_pairing_accepts_every_pair(
        self, expected: list[dict[str, Any]], found: list[dict[str, Any]]
    ) -> None:
        def accepted(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return judge(act(ToolCall("f", one)), act(ToolCall("f", other)), self.F).reward == 1.0

        pairing = len(expected) == len(found) and any(
            all(accepted(one, other) for one, other in zip(expected, order, strict=True))
            for order in itertools.permutations(found)
        )
        whole = judge(act(*(ToolCall("f", a) for a in expected)), act(*(ToolCall("f", a) for a in found)), self.F)
        assert whole.reward == float(pairing)


class TestWithoutDeclaredTools:
    def test_arguments_must_be_equal_as_json(self) -> None:
        gold = act(ToolCall("f", {"x": 1, "y": [True]}))
        assert judge(gold, act(ToolCall("f", {"y": [True], "x": 1}))).reward == 1.0
        for other in ({"x": 1.0, "y": [True]}, {"x": True, "y": [True]}, {"x": 1}, {}):
            assert judge(gold, act(ToolCall("f", other))).reward == 0.0


class TestMessages:
    def test_the_text_is_wanted_by_default(self) -> None:
        assert judge(act(text="Hello there"), act(text=" Hello there ")).reward == 1.0
        assert judge(act(text="Hello there"), act(text="Hello")).reward == 0.0

    def test_any_takes_every_text_but_no_blank_and_no_call(self) -> None:
        gold = act(text="Hello there")
        assert judge(gold, act(text="No."), messages="any").reward == 1.0
        assert judge(gold, act(text=" \n"), messages="any").reward == 0.0
        assert judge(gold, act(ToolCall("f", {}), text="Hello there"), messages="any").reward == 0.0

    def test_text_beside_calls_is_ignored(self) -> None:
        assert judge(act(ToolCall("f", {}), text="let me see"), act(ToolCall("f", {}))).reward == 1.0


class TestOptions:
    def test_strings_are_equal_as_written(self) -> None:
        texts = ["New York", "new york", " New  York\n", "NEW  YORK", "NewYork", "New York City"]
        gold, city = act(ToolCall("f", {"c": "New York"})), tool("f", {"c": {"type": "string"}})
        assert [t for t in texts if judge(gold, act(ToolCall("f", {"c": t})), city).reward] == ["New York"]
        assert [t for t in texts if judge(gold, act(ToolCall("f", {"c": t}))).reward] == ["New York"]

    def test_every_option_is_part_of_the_name(self) -> None:
        assert ToolCallMatch().name == "tool_call/1"
        assert ToolCallMatch(messages="any").name == "tool_call/1+messages=any"

    def test_an_option_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="use 'exact' or 'any'"):
            ToolCallMatch(messages="some")  # type: ignore[arg-type]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text("ab ", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=4,
)
schemas = st.sampled_from(
    [{}, {"type": "number"}, {"type": "string", "default": "a"}, {"default": 1}, {"anyOf": [{"type": "integer"}, {}]}]
)


class TestLaws:
    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.dictionaries(st.sampled_from("xyz"), values, max_size=3), min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("xyz"), schemas),
        st.booleans(),
    )
    def test_a_demonstration_that_can_judge_accepts_itself(
        self, arguments: list[dict[str, Any]], properties: dict[str, Any], declared: bool
    ) -> None:
        gold = act(*(ToolCall("f", a) for a in arguments))
        tools = [tool("f", properties)] if declared else []
        verdict = judge(gold, gold, *tools)
        assert (
            verdict.reward == 1.0
            or verdict.reason.startswith("unjudgeable demonstration: invalid")
            or (verdict.reward is None and "is not of type" in verdict.reason)
        )
        assert judge(gold, act(*gold.tool_calls, gold.tool_calls[0]), *tools).reward in (0.0, None)

    @settings(max_examples=150, deadline=None)
    @given(
        *[st.dictionaries(st.sampled_from("xy"), values, max_size=2)] * 2,
        st.dictionaries(st.sampled_from("xy"), schemas),
    )
    def test_meaning_the_same_is_symmetric(self, one: Any, other: Any, properties: dict[str, Any]) -> None:
        forth, back = reward(one, other, properties), reward(other, one, properties)
        assert (forth == 1.0) == (back == 1.0)


plain_schemas = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "integer"},
            {"type": ["number", "null"]},
            {"type": "boolean"},
            {"enum": ["a", "b"]},
            {"default": 1},
        ]
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array", "string"])},
        optional={
            "properties": st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
            "required": st.lists(st.sampled_from("xyz"), max_size=2, unique=True),
            "items": inner,
            "additionalProperties": st.booleans() | inner,
        },
    ),
    max_leaves=5,
)


class TestFastPath:
    """Plain schemas are decided without jsonschema: the verdict must be the same."""

    @settings(max_examples=300, deadline=None)
    @given(plain_schemas, values)
    def test_it_says_what_jsonschema_says(self, schema: dict[str, Any], value: Any) -> None:
        rules = rules_here(json.dumps(schema))
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (rules.problem(value) is None) == valid
