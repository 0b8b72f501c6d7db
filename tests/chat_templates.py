"""Chat templates, good and bad, on the tiny tokenizer."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from turntree.core.messages import Message, ToolCall

CONTENT = "message.content"
KEPT_FROM_THINKING = "(message.content if loop.last else message.content.split('</think>')[-1].lstrip('\\n'))"

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


def chatml(said: str = CONTENT) -> str:
    """ChatML with tools, in the manner of Qwen: results of parallel calls share one user turn; `said` is the
    expression for the content of an assistant turn."""
    return (
        "{%- if tools %}{{- '<|im_start|>system\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
        "{{- 'Call a function with <tool_call>{...}</tool_call>:' }}"
        "{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}"
        "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
        "{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'system' and loop.first %}"
        "{%- elif message.role == 'assistant' %}"
        f"{{%- set said = {said} %}}"
        "{{- '<|im_start|>assistant\n' + said }}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- if said or not loop.first %}{{- '\n' }}{%- endif %}"
        "{{- '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}"
        "{{- '\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\n' }}"
        "{%- elif message.role == 'tool' %}"
        "{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
        "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )


def numbered(where: str) -> str:
    """Messages `where` an expression holds carry their number: the whole grows at its end only, but such a message
    never looks alike at two places."""
    return (
        "{% for tool in tools or [] %}<|system|>{{ tool | tojson }}<|end|>{% endfor %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        f"{{% if {where} %}}{{{{ loop.index }}}}. {{% endif %}}{{{{ message.content }}}}"
        "{% for call in message.tool_calls or [] %}"
        "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


NUMBERED = numbered("message.role != 'assistant'")
# results carry the name of the function that was called before
NAMED_RESULTS = "{% set called = namespace(name='nothing') %}" + CHAT_TEMPLATE.replace(
    "{{ message['content'] }}", "{% if message.role == 'tool' %}{{ called.name }}: {% endif %}{{ message.content }}"
).replace("<tool_call>\n", "{% set called.name = call.function.name %}<tool_call>\n")
# the whole turn is one JSON object, ended by a token of its own; there is white space before what is said
JSON_CALLS = (
    "{% for tool in tools or [] %}<|system|>{{ tool | tojson }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>: "
    "{% for call in message.tool_calls or [] %}"
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}<|call|>"
    "{% else %}{{ message.content }}<|end|>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>:{% endif %}"
)
NO_GENERATION_PROMPT = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
NO_END = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# the last system message is moved to the front
HOISTING = (
    "{% for message in messages if message.role == 'system' %}<|system|>{{ message.content }}<|end|>{% endfor %}"
    "{% for message in messages if message.role != 'system' %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_ONLY = (
    "{% for message in messages if message.role in ['user', 'assistant'] %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS_FIRST = TEXT_ONLY.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
DATED = "<|system|>{{ strftime_now('%d %b %Y') }}<|end|>" + TEXT_ONLY
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEXT_ONLY


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(template)
    special = [token for token in ("<|im_start|>", "<|im_end|>", "<|call|>") if token in template]
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": special})
    if "<|im_end|>" in special:
        tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def system(content: str) -> Message:
    return Message("system", content)


def user(content: str) -> Message:
    return Message("user", content)


def said(content: str, *calls: ToolCall) -> Message:
    return Message("assistant", content, calls)


def result(content: str) -> Message:
    return Message("tool", content)


def whole(tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[dict] | None = None) -> str:
    """What the template writes when it is asked once, for everything."""
    chat = [message.to_chat() for message in messages]
    return tokenizer.apply_chat_template(chat, tools=tools or None, tokenize=False, add_generation_prompt=True)
