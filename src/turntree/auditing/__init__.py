"""Floor 4: how much of a rollout log's budget bought no gradient, and what would have saved it."""
