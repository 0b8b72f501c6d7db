"""Imported by a vLLM server in an environment of its own: its folder is the path of imports there."""
