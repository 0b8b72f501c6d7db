"""Policies that come with the package (weights and model cards only)."""
