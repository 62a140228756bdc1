"""All kernels."""

from __future__ import annotations

from collections.abc import Sequence

from . import linear_bytes, linear_codes, quantize_rows
from .kernel import Kernel

KERNELS: Sequence[Kernel] = (linear_codes.KERNEL, linear_bytes.KERNEL, quantize_rows.KERNEL)
