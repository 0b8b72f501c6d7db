"""Where a tree forks: rules that a sampler asks after every tool result. Plain numbers, no torch."""
