"""All kernels."""

from __future__ import annotations

from collections.abc import Sequence

from . import (
    attend_prompts,
    attend_rows,
    attend_tokens,
    linear_bytes,
    linear_codes,
    linear_scaled,
    normalize_rows,
    quantize_rows,
    restore_codes,
    rotate_and_store,
)
from .kernel import Kernel

KERNELS: Sequence[Kernel] = (
    linear_codes.KERNEL,
    linear_bytes.KERNEL,
    linear_scaled.KERNEL,
    quantize_rows.KERNEL,
    restore_codes.KERNEL,
    normalize_rows.KERNEL,
    rotate_and_store.KERNEL,
    attend_prompts.KERNEL,
    attend_rows.KERNEL,
    attend_tokens.KERNEL,
)
