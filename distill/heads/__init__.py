"""Training draft heads (EAGLE-3): a layer that continues what a model's own layers make of the text."""
