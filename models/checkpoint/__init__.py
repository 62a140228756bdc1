"""The tensors of a model directory: found by name, read one at a time, written in shards."""
