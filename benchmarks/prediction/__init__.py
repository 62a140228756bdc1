"""A decode step's time on an H100, predicted without a GPU from the engine's own launches and their machine code."""
