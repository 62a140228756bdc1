"""Settings of quantization: the recipe's section and its parts. They do not import torch."""
