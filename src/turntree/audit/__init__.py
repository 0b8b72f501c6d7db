"""How much of a rollout log's budget gave no gradient, and what would have saved it."""
