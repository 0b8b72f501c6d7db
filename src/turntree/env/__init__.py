"""Where environments are stepped, in this process or in worker processes that may die."""
