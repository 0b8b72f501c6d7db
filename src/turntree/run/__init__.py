"""What a run writes down. The run directory is the interface between stages, tools and people."""
