"""The registry of kernels, and what checks, times and tunes them."""
