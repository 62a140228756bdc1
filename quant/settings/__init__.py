"""Settings of quantization: the recipe's section and its parts. None of this imports torch."""
