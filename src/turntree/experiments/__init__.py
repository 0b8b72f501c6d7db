"""Comparisons of methods: matched arms over seeds, and the quickstart."""
