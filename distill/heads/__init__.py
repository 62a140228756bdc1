"""Training draft heads (EAGLE-3.1): a layer that continues what a model's own layers make of the text."""
