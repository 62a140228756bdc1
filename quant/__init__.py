"""Number formats and the ways to reach them: schemes, rounding, activation quantization.

This room knows tensors and modules. It knows nothing of recipes, files or servers.
"""
