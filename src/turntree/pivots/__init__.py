"""Floor 4: which turns of a trace are worth training on."""
