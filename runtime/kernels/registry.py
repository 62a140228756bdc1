"""All kernels."""

from __future__ import annotations

from collections.abc import Sequence

from . import (
    attend_prompts,
    attend_rows,
    attend_tokens,
    gate_rows,
    linear_bytes,
    linear_codes,
    linear_dense,
    linear_scaled,
    loss_rows,
    normalize_rows,
    quantize_rows,
    restore_codes,
    rotate_and_store,
    sample_tokens,
)
from .kernel import Kernel

KERNELS: Sequence[Kernel] = (
    linear_codes.KERNEL,
    linear_bytes.KERNEL,
    linear_scaled.KERNEL,
    linear_dense.KERNEL,
    gate_rows.KERNEL,
    quantize_rows.KERNEL,
    restore_codes.KERNEL,
    normalize_rows.KERNEL,
    rotate_and_store.KERNEL,
    attend_prompts.KERNEL,
    attend_rows.KERNEL,
    attend_tokens.KERNEL,
    sample_tokens.KERNEL,
    loss_rows.KERNEL,
)
