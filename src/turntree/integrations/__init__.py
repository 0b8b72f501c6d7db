"""Other trainers: pivots in their formats, and our verifiers as their reward functions. One file per framework."""
