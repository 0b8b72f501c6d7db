"""Laws hold however slow the machine is: no deadline per example."""

from hypothesis import settings

settings.register_profile("laws", deadline=None, derandomize=True)
settings.load_profile("laws")
