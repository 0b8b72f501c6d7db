"""Pivots in other trainers' formats: nothing is changed or lost on the way, and the reward is our verifier's."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_import import import_chat
from chat_templates import chatml, tokenizer_of
from exported_pivots import BOTH, CONVERSATION, FIND, TOOLS, write_pivots
from family_tokenizers import with_tokens_of
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.run.artifacts import PIVOTS
from turntree.stages.export import ExportConfig, bundle_of, run_export, tools_as_rendered
from turntree.traces.formats.responses import read_responses_row
from turntree.traces.schema import Trace
from turntree_interop.judging import Judge, pack_state, unpack_state
from turntree_interop.trl import export_trl, verifier_reward

FORMATS = ("trl", "verl", "skyrl", "nemo-gym")
SAID = "I will look.\n<tool_call>\n" + json.dumps({"name": "find_order", "arguments": {"order_id": "W1"}})
RIGHT, WRONG = f"{SAID}\n</tool_call>", f"{SAID}\n</tool_call>".replace("W1", "W2")


def exported(folder: Path, to: str, **options: Any) -> dict[str, Any]:
    pivots = write_pivots(folder)
    part = Part(to, options.pop("options", {}))
    return run_export(ExportConfig(pivots=str(pivots), pivot_format=part, **options), folder / "out")


def rows_of(folder: Path, name: str = "out/pivots.parquet") -> list[dict[str, Any]]:
    """Rows with their columns of JSON parsed."""
    table = pq.read_table(folder / name)
    told = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    parse = {key for key, feature in told.items() if feature["_type"] == "Json"}
    assert set(told) == set(table.column_names)
    found = [{key: json.loads(v) if key in parse else v for key, v in row.items()} for row in table.to_pylist()]
    return found


def reward_module(folder: Path) -> ModuleType:
    """`reward.py` of an export, imported as a framework does."""
    spec = importlib.util.spec_from_file_location("exported_reward", folder / "out" / "reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestRows:
    def test_every_pivot_is_a_row_with_its_pass_rate_and_messages_as_they_were(self, tmp_path: Path) -> None:
        exported(tmp_path, "trl")
        one, two = rows_of(tmp_path)
        assert (one["trace_id"], one["turn"], one["pass_rate"], one["role"]) == ("t", 0, 0.25, "pivot")
        assert [Message.from_chat(m) for m in two["prompt"][1:]] == [*CONVERSATION[1:4]]
        assert Message.from_chat(two["demonstration"]) == BOTH
        # no argument of another call was added as null, as a column with a schema would do
        assert two["prompt"][2]["tool_calls"][0]["function"]["arguments"] == {"order_id": "W1"}
        assert unpack_state(two["state"]) == TurnState("t", 1, CONVERSATION[:4], BOTH, TOOLS)

    @pytest.mark.parametrize("to", FORMATS)
    def test_every_row_has_the_weight_of_its_pivot_and_a_note_says_that_trainers_draw_uniformly(
        self, tmp_path: Path, to: str
    ) -> None:
        assert not any("weight" in note for note in exported(tmp_path, to)["notes"])
        (tmp_path / "out").rename(tmp_path / "equal")
        header, rows = PIVOTS.read(write_pivots(tmp_path))
        weighed = [{**row, "weight": weight} for row, weight in zip(rows, (0.5, 1.5), strict=True)]
        PIVOTS.write(tmp_path / "pivots.jsonl", {k: v for k, v in header.items() if k != "schema"}, weighed)
        config = ExportConfig(pivots=str(tmp_path / "pivots.jsonl"), pivot_format=Part(to))
        assert any("weight" in note for note in run_export(config, tmp_path / "out")["notes"])
        if to == "nemo-gym":
            found = [json.loads(line) for line in (tmp_path / "out" / "pivots.jsonl").read_text().splitlines()]
        else:
            found = rows_of(tmp_path)
        place = {"trl": None, "nemo-gym": "meta_info"}.get(to, "extra_info")
        assert [(row[place] if place else row)["weight"] for row in found] == [0.5, 1.5]

    def test_tools_stand_in_the_system_message_where_no_template_gets_them_and_a_note_says_so(
        self, tmp_path: Path
    ) -> None:
        told = exported(tmp_path, "verl")
        system = rows_of(tmp_path)[0]["prompt"][0]
        assert system["content"].startswith("You are a clerk.\n\n# Tools") and '"refund"' in system["content"]
        assert any("--model" in note for note in told["notes"])

    def test_a_demonstration_that_the_verifier_refuses_is_counted_and_left_out(self, tmp_path: Path) -> None:
        odd = (*CONVERSATION[:2], Message("assistant", "", (ToolCall("find_order", {"order_id": 5}),)))
        good = Trace(id="t", messages=CONVERSATION[:3], tools=TOOLS, split="train")
        pivots = write_pivots(tmp_path, [good, Trace(id="odd", messages=odd, tools=TOOLS, split="train")])
        told = run_export(ExportConfig(pivots=str(pivots), pivot_format=Part("trl")), tmp_path / "out")
        assert told["pivots"] == 1 and told["dropped"] == {"demonstration_not_judged": 1}

    def test_a_folder_is_never_replaced_and_none_is_left_by_a_failed_export(self, tmp_path: Path) -> None:
        exported(tmp_path, "trl")
        with pytest.raises(InputError, match="is there already"):
            exported(tmp_path, "verl")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pivots.parquet", "reward.py"]
        config = ExportConfig(pivots=str(tmp_path / "pivots.jsonl"), pivot_format=Part("trl", {"prompt": "text"}))
        with pytest.raises(InputError, match="--model"):
            run_export(config, tmp_path / "other")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pivots.parquet", "reward.py"]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith((".o", "other"))]

    def test_custom_code_that_a_file_names_is_not_run(self, tmp_path: Path) -> None:
        pivots = write_pivots(tmp_path, verifier="my_rules:judge")
        with pytest.raises(InputError, match="--verifier my_rules:judge"):
            run_export(ExportConfig(pivots=str(pivots), pivot_format=Part("trl")), tmp_path / "out")

    def test_a_format_of_ones_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = "def ids(bundle, out, *, name='a'):\n    (out / name).write_text(bundle.pivots[0].state.id)\n"
        (tmp_path / "own_format.py").write_text(code + "    return {'files': [name]}\n")
        monkeypatch.chdir(tmp_path)
        exported(tmp_path, "own_format:ids", options={"name": "b"})
        assert (tmp_path / "out" / "b").read_text() == "t#0"

    def test_pass_rates_are_said_to_be_of_the_verifier_that_they_were_profiled_with(self, tmp_path: Path) -> None:
        said = exported(tmp_path, "nemo-gym", verifier=Part("strict"))["notes"]
        assert any(re.match("pass rates are under 'recommended/.*', not 'strict", one) for one in said)
        assert any("under 'recommended/" in one for one in said[1:])


class TestNemoGym:
    def test_the_rows_come_back_through_our_own_import(self, tmp_path: Path) -> None:
        exported(tmp_path, "nemo-gym")
        one, two = (json.loads(line) for line in (tmp_path / "out" / "pivots.jsonl").read_text().splitlines())
        assert one["expected_action"]["type"] == "function_call" and one["pass_rate"] == 0.25
        assert two["expected_action"]["type"] == "function_call_batch"
        chat = read_responses_row(one)
        assert chat.only_last_turn and chat.group == "t"
        assert [Message.from_chat(m) for m in chat.messages[:2]] == [*CONVERSATION[:2]]
        assert chat.messages[-1]["tool_calls"][0]["function"]["name"] == "find_order"
        assert [tool["function"]["name"] for tool in chat.tools] == ["find_order", "refund"]

    def test_the_thoughts_of_earlier_turns_are_reasoning_items_before_what_was_said(self, tmp_path: Path) -> None:
        thinking = (*CONVERSATION[:2], replace(FIND, reasoning="Is it paid?"), *CONVERSATION[3:])
        pivots = write_pivots(tmp_path, [Trace(id="t", messages=thinking, tools=TOOLS, split="train")])
        run_export(ExportConfig(pivots=str(pivots), pivot_format=Part("nemo-gym")), tmp_path / "out")
        later = json.loads((tmp_path / "out" / "pivots.jsonl").read_text().splitlines()[1])
        items = later["responses_create_params"]["input"]
        assert [item["type"] for item in items[2:]] == ["reasoning", "function_call", "function_call_output"]
        assert items[2]["summary"] == [{"type": "summary_text", "text": "Is it paid?"}]

    def test_the_pivots_of_one_group_come_back_as_one_group(self, tmp_path: Path) -> None:
        made = [Trace(id=i, messages=CONVERSATION, tools=TOOLS, split="train", meta={"group": "task"}) for i in "ab"]
        write_pivots(tmp_path, made)
        config = ExportConfig(pivots=str(tmp_path / "pivots.jsonl"), pivot_format=Part("nemo-gym"))
        run_export(config, tmp_path / "out")
        traces, _ = import_chat([tmp_path / "out" / "pivots.jsonl"])
        assert [trace.group for trace in traces] == ["task"] * len(traces) and traces


class TestRewards:
    def test_trl_gets_one_reward_per_completion_and_none_where_it_is_not_judged(self, tmp_path: Path) -> None:
        exported(tmp_path, "trl")
        states = [row["state"] for row in rows_of(tmp_path)]
        odd = TurnState("odd", 0, CONVERSATION[:2], Message("assistant", "", (ToolCall("find_order", {}),)), TOOLS)
        broken = odd.demonstration, ToolCall("find_order", {"order_id": 5})
        unjudgeable = pack_state(TurnState("odd", 0, odd.history, Message("assistant", "", broken[1:]), TOOLS))
        reward = reward_module(tmp_path).reward
        completions = [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG, "", RIGHT)]
        given = {"state": [states[0], states[0], states[0], unjudgeable], "trainer_state": None, "log_extra": None}
        assert reward(prompts=[None] * 4, completions=completions, completion_ids=[[1]] * 4, **given) == [1, 0, 0, None]
        texts = [RIGHT, WRONG, "", RIGHT]  # a dataset of rendered prompts gives texts
        assert reward(prompts=[None] * 4, completions=texts, completion_ids=[[1]] * 4, **given) == [1, 0, 0, None]

    @pytest.mark.parametrize(("rule", "rewarded"), [("strict/1", 0.0), ("strict/1+cut_turns=judge", 1.0)])
    def test_a_cut_completion_gets_what_the_profile_gave_it(self, tmp_path: Path, rule: str, rewarded: float) -> None:
        header, rows = PIVOTS.read(write_pivots(tmp_path, verifier="strict"))
        told = {key: value for key, value in header.items() if key != "schema"} | {"verifier": rule}
        PIVOTS.write(tmp_path / "pivots.jsonl", told, rows)
        config = ExportConfig(pivots=str(tmp_path / "pivots.jsonl"), pivot_format=Part("trl"))
        export_trl(replace(bundle_of(config), stop_ids=(7,)), tmp_path / "out")
        state = [rows_of(tmp_path)[0]["state"]]
        said = [[FIND.to_chat()]]
        reward = reward_module(tmp_path).reward
        assert reward(prompts=[""], completions=said, completion_ids=[[3, 7]], state=state) == [1.0]
        assert reward(prompts=[""], completions=said, completion_ids=[[3, 4]], state=state) == [rewarded]

    def test_calls_that_trl_has_parsed_are_judged_as_calls(self, tmp_path: Path) -> None:
        state = pack_state(TurnState("t", 0, CONVERSATION[:2], FIND, TOOLS))
        said = [[{"role": "assistant", "content": "", "tool_calls": FIND.to_chat()["tool_calls"]}]]
        assert verifier_reward("strict")(prompts=[""], completions=said, state=[state]) == [1.0]

    @pytest.mark.parametrize("opened", ["<think>\n", ""])  # sampled, or begun by the prompt
    def test_a_thought_is_reasoning_as_our_own_renderers_have_it(self, opened: str) -> None:
        judge, thought = Judge("strict"), f"{opened}Sent? <tool_call>\n</think>\n\n"
        found = judge.action(f"{thought}It was sent yesterday.")
        assert found == Message("assistant", "It was sent yesterday.", reasoning="Sent? <tool_call>")
        assert judge.action(thought + RIGHT).tool_calls == judge.action(RIGHT).tool_calls != ()
        parsed = {"role": "assistant", "content": thought, "tool_calls": FIND.to_chat()["tool_calls"]}
        assert judge.action(parsed).content == "" and judge.action(parsed).tool_calls == FIND.tool_calls

    @pytest.mark.parametrize("verifier", [Part("paper"), Part("tool_call", {"messages": "any"})])
    def test_a_thought_alone_says_nothing_and_is_not_paid(self, verifier: Part) -> None:
        gold = Message("assistant", "It was sent yesterday.")
        state = pack_state(TurnState("t", 0, CONVERSATION[:2], gold, TOOLS))
        reward = verifier_reward(verifier.name, options=verifier.options)
        said = ["<think>Sent?</think>\n\n", "<think>Sent?", "<think>Sent?</think>\n\nYesterday."]
        assert reward(prompts=[""] * 3, completions=said, state=[state] * 3) == [0.0, 0.0, 1.0]

    def test_a_call_may_write_the_end_of_a_thought(self) -> None:
        call = Judge("strict").action(RIGHT.replace("W1", "</think>")).tool_calls[0]
        assert call.arguments == {"order_id": "</think>"}

    def test_a_completion_that_was_cut_off_gets_nothing_where_the_stop_ids_are_known(self) -> None:
        state = pack_state(TurnState("t", 0, CONVERSATION[:2], FIND, TOOLS))
        reward = verifier_reward("recommended", stop_ids=[7])
        two = {"prompts": ["", ""], "completions": [RIGHT, RIGHT], "state": [state, state]}
        assert reward(**two, completion_ids=[[3, 7], [3, 4]]) == [1.0, 0.0]
        assert reward(**two) == [1.0, 1.0]

    def test_a_dataset_without_its_state_says_what_to_do(self) -> None:
        with pytest.raises(InputError, match="turntree export pivots"):
            verifier_reward()(prompts=[""], completions=[""])

    def test_verl_gets_a_score_and_an_unjudged_action_is_never_a_zero(self, tmp_path: Path) -> None:
        exported(tmp_path, "verl")
        row = rows_of(tmp_path)[0]
        compute_score = reward_module(tmp_path).compute_score
        given = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
        assert compute_score(**given, solution_str=RIGHT, extra_info=row["extra_info"]) == {"score": 1, "judged": 1}
        assert compute_score(**given, solution_str=WRONG, extra_info=row["extra_info"]) == {"score": 0, "judged": 1}
        wrong_type = Message("assistant", "", (ToolCall("find_order", {"order_id": 5}),))
        odd = {"state": pack_state(TurnState("t", 0, CONVERSATION[:2], wrong_type, TOOLS))}
        with pytest.raises(InputError, match="not judged"):
            compute_score(**given, solution_str=RIGHT, extra_info=odd)
        assert compute_score(**given, solution_str=RIGHT, extra_info=odd, unjudged=0.5) == {"score": 0.5, "judged": 0}

    @given(
        text=st.text(max_size=40),
        arguments=st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.lists(st.booleans()), max_size=3),
    )
    def test_a_state_survives_its_column(self, text: str, arguments: dict[str, Any]) -> None:
        history = (Message("user", text), Message("assistant", "", (ToolCall("f", arguments, "1"),)))
        state = TurnState("t", 3, history, Message("assistant", text or "x"), TOOLS, {"seed": 1})
        assert unpack_state(pack_state(state)) == state

    def test_damaged_states_and_unknown_call_formats_are_named(self) -> None:
        with pytest.raises(InputError, match="field 'state'"):
            Judge("strict")([("{", Message("assistant", "a"))])
        with pytest.raises(InputError, match="hermes"):
            Judge("strict", tool_format="xml")  # pyright: ignore


class TestPrompts:
    """The prompt of a trainer that passes no tools equals the prompt with tools."""

    def template(self, messages: list[dict[str, Any]], tools: Any = ()) -> str:
        first = messages[0]["content"] if messages[0]["role"] == "system" else ""
        head = first + ("\nTOOLS " + json.dumps(tools) if tools else "")
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return (f"<s>{head}</s>" if head else "") + "".join(f"<{m['role']}>{m['content']}" for m in rest) + "<a>"

    @pytest.mark.parametrize("messages", (CONVERSATION[:2], CONVERSATION[1:2]))
    def test_what_a_template_writes_into_the_system_message(self, messages: tuple[Message, ...]) -> None:
        chat = [message.to_chat() for message in messages]
        found = tools_as_rendered(chat, TOOLS, self.template)
        assert found is not None
        assert self.template(found) == self.template(chat, list(TOOLS))

    def test_a_template_that_shows_tools_elsewhere_is_noticed(self) -> None:
        chat = [message.to_chat() for message in CONVERSATION[:2]]
        assert tools_as_rendered(chat, TOOLS, lambda m, t=(): self.template(m) + (f"[{len(t)}]" if t else "")) is None

    def test_a_rendered_prompt_is_the_tokens_that_were_profiled(self, tmp_path: Path) -> None:
        from turntree.stages.policy import load_renderer

        folder = tmp_path / "model"
        tokenizer_of(chatml()).save_pretrained(folder)
        told = exported(tmp_path, "trl", model=str(folder), options={"prompt": "text"})
        tokenizer, renderer = load_renderer(str(folder))
        assert told["prompt"] == "text"
        for row in rows_of(tmp_path):
            state = unpack_state(row["state"])
            assert tokenizer(row["prompt"])["input_ids"] == list(renderer.prompt(state.history, state.tools))
        assert told["notes"] == []


def test_calls_that_the_exported_reward_does_not_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family may write calls in a form of its own."""
    from turntree.render.families import family
    from turntree.stages import policy

    folder = tmp_path / "model"
    tokenizer = with_tokens_of("deepseek-v3")
    tokenizer.chat_template = chatml()
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(policy, "renderer_of", lambda renderer, tokenizer, folder: family(tokenizer, "deepseek-v3"))
    told = exported(tmp_path, "verl", model=str(folder))
    assert any(note.startswith("2 demonstrated turns are not read back") for note in told["notes"])


def test_a_folder_without_a_template_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turntree.render.families import family
    from turntree.stages import policy

    tokenizer = with_tokens_of("qwen3")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(policy, "renderer_of", lambda renderer, tokenizer, folder: family(tokenizer, "qwen3"))
    with pytest.raises(InputError, match="no chat template"):
        exported(tmp_path, "verl", model=str(tmp_path / "model"))


def test_rates_under_another_rule_than_the_exported_one_are_said(tmp_path: Path) -> None:
    """As of a profile whose verifier was told of an environment, or of an older version."""
    header, rows = PIVOTS.read(write_pivots(tmp_path))
    kept = {key: value for key, value in header.items() if key != "schema"}
    PIVOTS.write(tmp_path / "pivots.jsonl", kept | {"verifier": "recommended/1+effects=executed"}, rows)
    config = ExportConfig(pivots=str(tmp_path / "pivots.jsonl"), pivot_format=Part("verl"))
    assert any("recommended/1" in note for note in run_export(config, tmp_path / "out")["notes"])


@pytest.mark.parametrize("model", [False, True])
def test_prompts_whose_words_spell_a_control_token_are_counted_and_stay_as_written(tmp_path: Path, model: bool) -> None:
    words = (
        Message("user", "Say <|im_end|> now."),
        FIND,
        Message("tool", "2.5", tool_call_id="c1"),
        Message("user", "?"),
    )
    said = Trace(id="s", messages=(*words, FIND), tools=TOOLS, split="train", success=True)
    plain = Trace(id="p", messages=(Message("user", "Hi."), FIND), tools=TOOLS, split="train", success=True)
    tokenizer_of(chatml()).save_pretrained(tmp_path / "model")
    config = ExportConfig(
        pivots=str(write_pivots(tmp_path, [said, plain])),
        pivot_format=Part("trl"),
        model=str(tmp_path / "model") if model else "",
    )
    told = run_export(config, tmp_path / "out")
    assert told["control_tokens_in_words"] == 2 and any("2 prompts spell" in note for note in told["notes"])
    assert sum("Say <|im_end|> now." in str(row["prompt"]) for row in rows_of(tmp_path)) == 2
