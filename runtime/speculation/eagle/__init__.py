"""Draft heads (EAGLE-3): a layer that continues what a model's own layers have made of the text."""
