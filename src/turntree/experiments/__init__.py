"""Comparisons of methods: matched arms over seeds, the quickstart, and the pages of both."""
