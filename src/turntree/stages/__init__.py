"""Stages. Each reads artifacts, writes artifacts, and can be run again from its `config.json`."""
