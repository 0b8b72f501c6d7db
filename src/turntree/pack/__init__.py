"""A credited tree as a batch in which every unique token lies once, and the forward pass over it."""
