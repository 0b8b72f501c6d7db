"""turntree: agentic RL post-training that pays only for turns that teach."""

__version__ = "0.1.0"
