"""Floor 2: where environments are stepped, in this process or in worker processes that may die."""
