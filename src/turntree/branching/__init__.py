"""Where a tree forks: policies that a sampler asks after every tool result. Plain numbers, no torch."""
