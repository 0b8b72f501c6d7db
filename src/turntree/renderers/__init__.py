"""Floor 2: renderers turn messages into token ids and sampled token ids back into messages.

`template.ChatRenderer` speaks through a tokenizer's own chat template, cut into `segments`; `tool_calls` finds the
calls in sampled text.
"""
