"""ALFWorld's household games: an engine of our own, its experts, generated games and the functional verifier."""
