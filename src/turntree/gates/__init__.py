"""Floor 2: gates stop a group of rollouts that has nothing left to teach, and are calibrated on finished groups."""
