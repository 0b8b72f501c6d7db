"""Floor 2: expert traces. One documented record, importers for what people have, splits, pivot candidates."""
