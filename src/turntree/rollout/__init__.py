"""Growing rollout trees: in waves of fixed membership, or many groups in flight."""
