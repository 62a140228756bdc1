"""The GPU kernels, without a GPU."""
