"""Filters of whole groups: before a group is planted (GRESO), after it is finished (DAPO). No torch."""
