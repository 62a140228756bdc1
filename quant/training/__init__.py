"""Quantized linears to train with: fake quantization, and stored weights that stay frozen."""
