"""Static pages about a run directory, which also say what it lacks."""
