"""Rollouts of any framework, read from its logs into one shape. No torch. A log format of your own: see `read`."""
