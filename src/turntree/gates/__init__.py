"""Gates: stop a group mid-rollout when it has nothing left to teach. No torch."""
