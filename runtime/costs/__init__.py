"""How long a step takes on a device: a model's sizes without its weights, and cost models that use them."""
