"""Engines turn prompts of token ids into sampled token ids with their exact statistics.

`hf` samples from any stock Transformers decoder, `scripted` answers from a function (tests, tutorials), `checkpoint`
loads and saves policies. Nothing is imported here: `scripted` works without torch.
"""
