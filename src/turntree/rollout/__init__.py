"""Floor 3: growing rollout trees: in waves of fixed membership, or many groups in flight."""
