"""A decoder on a GPU."""

from .operators import GpuOperators

__all__ = ["GpuOperators"]
