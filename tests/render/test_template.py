"""Chat templates of all characters: those that can be cut are cut, the others are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import chat_templates as templates
from chat_templates import LOOK, chatml, result, said, system, tokenizer_of, user, whole
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.render.template import ChatRenderer

LOOK_AT_MAP = ToolCall("look", {"at": "map"})
HI_HO = [user("Hi."), said("Ho."), user("Hm.")]
THINKING = "<think>\nLeft or right?\n</think>\n\n"
IN_CONTENT = said(THINKING + "Go left.")
APART = replace(said("Go left."), reasoning="Left or right?")
# a thought before the last turn only, an empty one too, as Qwen3 has it; Qwen3-Thinking-2507's prompt has begun it
HYBRID = chatml(
    "(('<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' if loop.last else '') + message.content)"
)
BEGUN = HYBRID.replace("{{- '<|im_start|>assistant\n' }}", "{{- '<|im_start|>assistant\n<think>\n' }}")


def renderer_of(template: str, **options: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template), **options)


def decoded(template: str, ids: tuple[int, ...]) -> str:
    return tokenizer_of(template).decode(ids, clean_up_tokenization_spaces=False)


def without_thoughts(text: str) -> str:
    return re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)


class Counting:
    """A tokenizer that counts how many messages it renders, and how often it encodes."""

    def __init__(self, template: str) -> None:
        self._tokenizer = tokenizer_of(template)
        self.rendered: list[int] = []
        self.encoded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: list[dict], **options: object) -> str:
        self.rendered.append(len(messages))
        return self._tokenizer.apply_chat_template(messages, **options)

    def encode(self, text: str, **options: object) -> list[int]:
        self.encoded += 1
        return self._tokenizer.encode(text, **options)


def long_talk(turns: int) -> list[Message]:
    messages = [system("Be brief."), user("Find the mug.")]
    for turn in range(turns):
        messages += [said(f"go to drawer {turn}"), user(f"You see nothing in drawer {turn}.")]
    return messages


# tokens, letter by letter


def test_chatml_is_cut_after_the_stop_token() -> None:
    """The newline after <|im_end|> is never sampled: it opens the next segment."""
    template = chatml()
    renderer = renderer_of(template)
    history = [user("Which way?"), said("Go left."), user("Done.")]
    assert (
        decoded(template, renderer.prompt(history[:1]))
        == "<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(template, renderer.completion(history[1])) == "Go left.<|im_end|>"
    assert decoded(template, renderer.extend(history[:2], history[2:])) == (
        "\n<|im_start|>user\nDone.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_of_parallel_calls_share_a_turn() -> None:
    template = chatml()
    history = [user("Look."), said("Both ways.", LOOK_AT_MAP, ToolCall("look", {"at": "sky"}))]
    renderer = renderer_of(template)
    assert decoded(template, renderer.completion(history[-1])) == (
        'Both ways.\n<tool_call>\n{"name": "look", "arguments": {"at": "map"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>'
    )
    assert renderer.parse(renderer.completion(history[-1])) == history[-1]
    assert decoded(template, renderer.extend(history, [result("A map."), result("Blue.")], [LOOK])) == (
        "\n<|im_start|>user\n<tool_response>\nA map.\n</tool_response>"
        "\n<tool_response>\nBlue.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_tokens_are_those_of_the_template_and_the_end_of_the_sequence() -> None:
    tokenizer = tokenizer_of(templates.JSON_CALLS)
    stops = {tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|call|>")}
    assert ChatRenderer(tokenizer).stop_ids == stops
    tokenizer.eos_token = "<|tool|>"
    assert ChatRenderer(tokenizer).stop_ids == stops | {tokenizer.convert_tokens_to_ids("<|tool|>")}


def test_a_template_may_end_a_turn_without_a_special_token() -> None:
    lines = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = renderer_of(lines)
    assert decoded(lines, renderer.completion(said("Go left."))) == " Go left.\n"
    assert renderer.parse(renderer.completion(said("Go left."))) == said("Go left.")
    with pytest.raises(InputError, match="holds a stop token, after which no policy goes on"):
        renderer.completion(said("Go left.\nStop."))


def test_a_mark_that_the_tokenizer_has_no_token_for_is_refused_and_its_first_character_never_ends_a_turn() -> None:
    with pytest.raises(InputError, match=r"no token '.END.', with which the chat template ends .* add this as a"):
        renderer_of(CHAT_TEMPLATE.replace("<|end|>", "[END]"))


def test_the_day_is_not_in_the_tokens() -> None:
    renderer = renderer_of(templates.DATED)
    assert decoded(templates.DATED, renderer.prompt([user("Hi.")])).startswith("<|system|>01 Jan 2025<|end|>")


def test_a_default_system_message_that_is_also_given_is_not_missed() -> None:
    default = "{% if messages[0].role != 'system' %}<|system|>Be brief.<|end|>{% endif %}" + CHAT_TEMPLATE
    renderer = renderer_of(default)
    assert renderer.prompt([system("Be brief."), user("Hi.")]) == renderer.prompt([user("Hi.")])


# thinking


def test_thinking_that_stays_is_rendered_like_any_text() -> None:
    template = chatml()
    messages = [user("Which way?"), said(THINKING + "Go left."), user("And now?")]
    ids = renderer_of(template).prompt(messages)
    assert decoded(template, ids) == whole(tokenizer_of(template), messages)


@pytest.mark.parametrize(
    ("template", "thinking", "opened"),
    [
        (chatml(templates.KEPT_FROM_THINKING), IN_CONTENT, ""),
        (HYBRID, APART, ""),
        (BEGUN, APART, "<think>\n"),
    ],
)
def test_a_thought_that_the_template_drops_stays_and_everything_else_is_as_it_writes_it(
    template: str, thinking: Message, opened: str
) -> None:
    """36 of 48 candidates of such a model were refused, and `sft` ended in an error."""
    renderer, own = renderer_of(template), tokenizer_of(template)
    talk = [system("Be brief."), user("Which way?"), thinking, user("And now?")]
    talk += [said("Stop."), user("Why?"), said("", LOOK_AT_MAP), result("A map.")]
    for end in (2, 4, 6, 8):
        text = decoded(template, renderer.prompt(talk[:end]))
        assert without_thoughts(text) == without_thoughts(whole(own, talk[:end]))
        assert text.endswith(f"<|im_start|>assistant\n{opened}") and (end == 2 or "Left or right?" in text)
    grown = renderer.prompt(talk[:2])
    for place in (2, 4, 6):
        grown += renderer.completion(talk[place]) + renderer.extend(talk[: place + 1], talk[place + 1 : place + 2])
    assert grown == renderer.prompt(talk)


def test_a_template_that_drops_more_than_thoughts_is_refused_by_message() -> None:
    shorter = chatml("(message.content if loop.last else message.content[:5])")
    with pytest.raises(InputError, match="renders message 1 differently once more messages"):
        renderer_of(shorter).prompt([user("Which way?"), said("Go left."), user("And now?")])


def test_a_generation_prompt_that_history_does_not_keep_is_refused() -> None:
    with pytest.raises(InputError, match="renders message 1 differently than its generation prompt begins it"):
        renderer_of(templates.THINKS_FIRST)


# refusals


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            templates.NO_GENERATION_PROMPT,
            "has no generation prompt .add_generation_prompt changes nothing.; use a template",
        ),
        (templates.NO_END, "does not end an assistant turn; let it write a stop token"),
        (
            "{{ raise_exception('never') }}",
            "cannot render these messages .TemplateError: never.; their roles are: user",
        ),
        ("{% for %}", "cannot render these messages .TemplateSyntaxError"),
    ],
)
def test_a_template_that_cannot_be_sampled_from_is_refused_at_once(template: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as refused:
        renderer_of(template)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_without_a_template_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="chat template"):
        ChatRenderer(tiny_tokenizer(chat_template=None))


def test_a_system_message_that_moves_is_refused_by_message() -> None:
    renderer = renderer_of(templates.HOISTING)
    renderer.prompt([system("Be brief."), user("Which way?"), said("Go left."), user("And now?")])
    with pytest.raises(InputError, match="renders message 0 differently once message 1 follows"):
        renderer.prompt([user("Which way?"), said("Go left."), system("Be brief."), user("And now?")])


@pytest.mark.parametrize(
    ("messages", "missing"),
    [
        ([system("Be brief."), user("Hi.")], "message 0 .system."),
        ([user("Hi."), said("Ho."), result("A map.")], "message 2 .tool."),
        ([user("Hi."), said("Ho."), user("Hm."), said("Ah."), user("Now."), system("Be brief.")], "message 5 .system."),
        ([user("Hi."), said("", LOOK_AT_MAP)], "tool calls"),
    ],
)
def test_nothing_is_left_out_silently(messages: list[Message], missing: str) -> None:
    renderer = renderer_of(templates.TEXT_ONLY)
    with pytest.raises(InputError, match=f"the chat template leaves out {missing}"):
        renderer.prompt(messages)


def test_a_system_message_that_waits_for_a_user_in_vain_is_not_left_out_silently() -> None:
    """As Gemma 3 has it: the system message stands in the user's first one."""
    brief = "{% set brief = messages[0].content + ' ' if messages[0].role == 'system' else '' %}"
    turns = CHAT_TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    renderer = renderer_of(
        brief + turns.replace("message['content']", "(brief if loop.first else '') + message['content']")
    )
    assert renderer.prompt([system("Be brief."), user("Hi.")])
    with pytest.raises(InputError, match=r"leaves out message 0 .system."):
        renderer.prompt([system("Be brief.")])


def test_tools_are_not_left_out_silently() -> None:
    with pytest.raises(InputError, match="leaves out the tools; use a template that renders this, or put it into the"):
        renderer_of(CHAT_TEMPLATE).prompt([user("Hi.")], [LOOK])


def test_the_complaint_of_a_template_is_passed_on() -> None:
    renderer = renderer_of(templates.PICKY)
    assert renderer.prompt([user("Hi.")])
    with pytest.raises(InputError, match=r"TemplateError: no system here.; their roles are: system user"):
        renderer.prompt([system("Be brief."), user("Hi.")])


def test_a_call_that_would_not_be_read_back_is_refused() -> None:
    """A demonstration that the parser does not understand could never be matched by a rollout."""
    renderer = renderer_of(chatml(), tool_format="json")
    with pytest.raises(InputError, match=r"'tool_calls': is read as \[\] .*device\.renderer\.tool_format"):
        renderer.completion(said("", LOOK_AT_MAP))
    assert (
        renderer_of(chatml(), tool_format="none")
        .parse(renderer_of(chatml()).completion(said("", LOOK_AT_MAP)))
        .tool_calls
        == ()
    )


def test_tools_are_refused_where_no_call_of_the_policy_would_be_read() -> None:
    """Its calls stayed text, in silence, so that every rollout with tools failed."""
    template = chatml().replace("'name': call.function.name", "'function': call.function.name")
    with pytest.raises(InputError, match=r"'tool_calls': is read as \[\] .*tool_format"):
        ChatRenderer(tokenizer_of(template)).prompt([user("Which way?")], [LOOK])
    assert ChatRenderer(tokenizer_of(template)).prompt([user("Which way?")])
    assert ChatRenderer(tokenizer_of(template), tool_format="none").prompt([user("Which way?")], [LOOK])


def test_a_stop_token_inside_a_demonstration_is_refused() -> None:
    with pytest.raises(InputError, match=r"'Go left.<\|end\|>Stop.' holds a stop token"):
        renderer_of(CHAT_TEMPLATE).completion(said("Go left.<|end|>Stop."))


# cost


def test_a_conversation_is_rendered_in_small_pieces() -> None:
    """With 30 turns of history, a new turn renders three messages at most: the cost does not grow with history."""
    tokenizer = Counting(chatml())
    renderer = ChatRenderer(tokenizer)
    talk = long_talk(30)
    renderer.prompt(talk)
    tokenizer.rendered.clear()
    renderer.extend([*talk, said("stop here")], [user("a new thing")])
    renderer.completion(said("a new thing to say"))
    assert tokenizer.rendered and max(tokenizer.rendered) <= 3


def test_results_that_name_their_call_are_rendered_in_pieces_too() -> None:
    tokenizer = Counting(templates.NAMED_RESULTS)
    renderer = ChatRenderer(tokenizer)
    talk = [*long_talk(5), said("", LOOK_AT_MAP), result("A map."), said("So.")]
    renderer.prompt(talk)
    tokenizer.rendered.clear()
    renderer.extend([*talk, user("Again."), said("", LOOK_AT_MAP)], [result("The same map.")])
    assert tokenizer.rendered and max(tokenizer.rendered) <= 3


def test_what_was_rendered_once_is_remembered() -> None:
    tokenizer = Counting(chatml())
    renderer = ChatRenderer(tokenizer)
    talk = long_talk(10)
    for end in range(2, len(talk) + 1):
        renderer.prompt(talk[:end])
    encoded = tokenizer.encoded
    tokenizer.rendered.clear()
    for end in range(2, len(talk) + 1):
        renderer.prompt(talk[:end])
    assert (tokenizer.rendered, tokenizer.encoded) == ([], encoded)


def test_memory_is_bounded_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turntree.render.turns._REMEMBERED_TOKENS", 40)
    tokenizer = Counting(chatml())
    renderer = ChatRenderer(tokenizer)
    first = renderer.completion(said("first thing"))
    for number in range(50):
        renderer.completion(said(f"thing {number}"))
    before = tokenizer.encoded
    assert renderer.completion(said("first thing")) == first
    assert tokenizer.encoded == before + 1, "it was forgotten, and made again"


def test_a_template_that_numbers_messages_is_rendered_whole() -> None:
    tokenizer = Counting(templates.NUMBERED)
    renderer = ChatRenderer(tokenizer)
    talk = long_talk(3)
    ids = renderer.prompt(talk)
    assert max(tokenizer.rendered) == len(talk)
    assert decoded(templates.NUMBERED, ids) == whole(tokenizer_of(templates.NUMBERED), talk)


@pytest.mark.parametrize(
    ("where", "messages", "tools"),
    [
        (
            "messages[0].role == 'system' and message.role == 'user'",
            [system("Be brief."), user("Hi."), said("Ho.")],
            [],
        ),
        ("tools and message.role == 'user'", HI_HO, [LOOK]),
        ("message.role == 'tool'", [*HI_HO, said("", LOOK_AT_MAP), result("A map."), result("A sky.")], []),
    ],
)
def test_a_template_is_local_for_some_conversations_only(where: str, messages: list[Message], tools: list) -> None:
    """Conversations of one sort that are rendered in pieces do not make another sort so."""
    template = templates.numbered(where)
    tokenizer = Counting(template)
    renderer = ChatRenderer(tokenizer)
    plain = [user("Hi."), said("Ho."), user("Hm."), said("Ah."), user("So."), said("Yes."), user("No.")] * 3
    renderer.prompt(plain)
    assert max(tokenizer.rendered) < len(plain), "in pieces"
    assert decoded(template, renderer.prompt(messages, tools)) == whole(tokenizer_of(template), messages, tools)


def test_a_template_that_treats_one_length_apart_is_refused() -> None:
    renderer = renderer_of("{% if messages | length == 4 %}<|system|>Four!<|end|>{% endif %}" + CHAT_TEMPLATE)
    with pytest.raises(InputError, match="renders message 0 differently once message 2 follows"):
        renderer.prompt([system("Be brief."), *HI_HO])


REASONING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_reasoning_that_the_template_drops_later_stays_in_the_context() -> None:
    """Sampled tokens are never rewritten: before, such a template ended the run at the first new question."""
    renderer = renderer_of(REASONING)
    thought = replace(said("Left."), reasoning="Which way?")
    assert renderer.parse(renderer.completion(thought)) == thought
    tokenizer = tokenizer_of(REASONING)
    prompt = renderer.prompt([user("Hi."), thought, user("And now?")])
    assert "<think>Which way?</think>Left.<|end|><|user|>And now?" in tokenizer.decode(prompt)
    grown = renderer.prompt([user("Hi.")]) + renderer.completion(thought)
    assert grown + renderer.extend([user("Hi."), thought], [user("And now?")]) == prompt


# several templates


def test_conversations_with_tools_are_written_by_the_template_for_them() -> None:
    """As Transformers does: `tool_use` of Hermes 3 does not even render without tools."""
    tokenizer = tokenizer_of(chatml())
    tools_only = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + chatml()
    tokenizer.chat_template = {"default": chatml().replace("message.tool_calls or []", "[]"), "tool_use": tools_only}
    renderer = ChatRenderer(tokenizer)
    talk = [user("Hi."), said("Ho."), user("Look."), said("", LOOK_AT_MAP), result("A map."), said("So."), user("On.")]
    for messages, tools in ((talk[:3], []), (talk, [LOOK])):
        ids = renderer.prompt(messages[:1], tools)
        for place in range(1, len(messages), 2):
            assert renderer.parse(renderer.completion(messages[place])) == messages[place]
            ids += renderer.completion(messages[place])
            ids += renderer.extend(messages[: place + 1], messages[place + 1 : place + 2], tools)
        assert ids == renderer.prompt(messages, tools)
        assert tokenizer.decode(ids) == whole(tokenizer, messages, tools)
    with pytest.raises(InputError, match="leaves out tool calls"):
        renderer.prompt(talk)


def test_templates_that_write_turns_differently_are_refused() -> None:
    tokenizer = tokenizer_of(chatml())
    tokenizer.chat_template = {"default": chatml(), "tool_use": chatml("('So: ' + message.content)")}
    with pytest.raises(InputError, match="`default` and `tool_use` write an assistant turn differently; keep one"):
        ChatRenderer(tokenizer)


# thoughts are no actions

THINKS = chatml(
    "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else '')"
    " + message.content"
)
BEGUN = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}<think>\n{{ message.reasoning_content or '' }}</think>{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "map"}}\n</tool_call>'


def read(template: str, text: str) -> Message:
    return renderer_of(template).parse(tokenizer_of(template).encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "opened"),
    [(THINKS, "<think>"), (THINKS, "\n<think>"), (chatml(), "<think>"), (BEGUN, "")],
)
def test_a_turn_that_stops_inside_of_its_thought_says_and_does_nothing(template: str, opened: str) -> None:
    """A verifier took the thought for the answer, and a call that it held was executed."""
    for thought in ("Is it 42?", f"Is it 42?\n{CALLED}"):
        assert read(template, f"{opened}\n{thought}\n") == Message("assistant", "", reasoning=thought)


def test_a_turn_whose_thought_the_prompt_began_is_read() -> None:
    thought = replace(said("Left."), reasoning="Hm.")
    renderer = renderer_of(BEGUN)
    assert renderer.parse(renderer.completion(thought)) == thought
    assert renderer.parse(renderer.completion(said("Left."))) == said("Left.")


def test_a_call_inside_of_a_thought_is_not_made_without_a_place_for_thoughts_either() -> None:
    thought = f"<think>I could {CALLED} but no.</think>"
    assert read(chatml(), f"{thought}Done.") == said(f"{thought}Done.")
    assert read(chatml(), f"{thought}\n\nSo:\n{CALLED}") == said(f"{thought}\n\nSo:", LOOK_AT_MAP)
    assert read(chatml(), f"{thought}\n{CALLED}") == said(thought, LOOK_AT_MAP)


def test_a_demonstrated_call_inside_of_a_thought_is_refused_by_its_reason() -> None:
    """Real logs hold some: servers end an open thought at a call."""
    with pytest.raises(InputError, match=r"'tool_calls': .*outside of a thought that does not end"):
        renderer_of(chatml()).completion(said("<think>\nI look.", LOOK_AT_MAP))


# what is read is what was said


def test_text_that_the_template_drops_is_not_lost_silently() -> None:
    """Llama 3.1 writes a call without the text before it."""
    renderer = renderer_of(templates.JSON_CALLS)
    assert renderer.completion(said("", LOOK_AT_MAP))
    with pytest.raises(InputError, match=r"'content': is read as '' where .*'I look\.'; no policy can say this"):
        renderer.completion(said("I look.", LOOK_AT_MAP))


def test_text_that_would_be_read_as_a_call_is_refused() -> None:
    with pytest.raises(InputError, match=r"'content': is read as \['look .*put a call into tool_calls"):
        renderer_of(chatml()).completion(said(f"Write {CALLED} to look."))
    assert renderer_of(chatml()).completion(said("Write <tool_call> to call."))


def test_reasoning_that_would_be_read_otherwise_is_refused() -> None:
    renderer = renderer_of(THINKS)
    with pytest.raises(InputError, match="read as"):
        renderer.completion(replace(said("Left."), reasoning="A </think> is here."))
    with pytest.raises(InputError, match=r"'reasoning_content': is read as 'Ah\.' where the message has 'Hm\.'"):
        other = THINKS.replace("message.reasoning_content +", "message.reasoning_content.replace('Hm.', 'Ah.') +")
        renderer_of(other).completion(replace(said("Left."), reasoning="Hm."))


@pytest.mark.parametrize("content", [THINKING + "Go left.", " Go left.\n", "Cafe\u0301", "Go.</think> left", "\ud800"])
def test_a_thought_in_the_content_white_space_and_odd_letters_are_no_reason_to_refuse(content: str) -> None:
    for template in (THINKS, chatml(), chatml("(message.content | trim)")):
        assert renderer_of(template).completion(said(content))


def test_a_turn_that_calls_in_a_later_thought_is_text() -> None:
    """Only what it says aloud is done, and half of a turn is not."""
    for aloud in (f"First. <think>I could {CALLED}</think> Go.", f"First. <think>I could {CALLED}"):
        assert read(chatml(), aloud) == said(aloud)
    assert read(THINKS, f"<think>\nHm.\n</think>\n\n<think>Or {CALLED}</think>").tool_calls == ()
    assert read(chatml(), f"<think>Hm.</think>Say it. <think>Well.</think>{CALLED}").tool_calls
