"""Which turns of a trace are worth training on: they are profiled and selected here, and trained in `train.pivot`."""
