"""Property tests have no deadline per example: the machine may be slow, and the first call imports scipy."""

from hypothesis import settings

settings.register_profile("observe", deadline=None, derandomize=True)
settings.load_profile("observe")
