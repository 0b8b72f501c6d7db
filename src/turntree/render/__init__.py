"""Renderers turn messages into token ids and sampled token ids back into messages.

`template.ChatRenderer` uses a tokenizer's own chat template, cut into `segments`; `tool_calls` parses the calls in
sampled text.
"""
