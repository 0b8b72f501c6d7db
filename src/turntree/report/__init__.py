"""Floor 5: static pages about a run directory, which also say what it lacks."""
