"""Expert traces. One documented record, importers for what people have, splits, pivot candidates."""
