"""All kernels."""

from __future__ import annotations

from collections.abc import Sequence

from . import linear_bytes, linear_codes, linear_scaled, quantize_rows, restore_codes
from .kernel import Kernel

KERNELS: Sequence[Kernel] = (
    linear_codes.KERNEL,
    linear_bytes.KERNEL,
    linear_scaled.KERNEL,
    quantize_rows.KERNEL,
    restore_codes.KERNEL,
)
