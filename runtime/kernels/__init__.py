"""Triton kernels, one file a kernel, and the harness that checks them without a GPU. Needs torch and triton alone."""
