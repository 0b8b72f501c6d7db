"""From credited trees to new weights: pack every unique token once, compute log-probabilities and loss, step."""
