"""Filters of whole groups: before a group is started (GRESO) and after it has finished (DAPO). No torch."""
