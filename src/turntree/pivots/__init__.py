"""Which turns of a trace are worth training on."""
