"""Gates stop groups of rollouts that are likely to have no gradient; calibrated on finished groups."""
