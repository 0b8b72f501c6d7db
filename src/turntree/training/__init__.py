"""From credited trees to new weights: pack every unique token once, score, lose, step."""
