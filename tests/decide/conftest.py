"""Property tests have no deadline per example: the machine may be slow."""

from hypothesis import settings

settings.register_profile("gates", deadline=None, derandomize=True)
settings.load_profile("gates")
