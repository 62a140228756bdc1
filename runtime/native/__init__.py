"""Kernels in C++ for CPUs with AVX-512 or AVX2, and torch's operators where they cannot be compiled."""
