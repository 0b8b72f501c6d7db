"""Floor 5: one static page that says what a run directory shows, and what it does not."""
