"""All kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ..attention import attend_prompts, attend_rows, attend_tokens_checks
from ..base.kernel import Kernel
from ..linear import gate_rows, linear_bytes, linear_codes, linear_dense, restore_codes
from ..rows import loss_rows, normalize_rows, quantize_rows, rotate_and_store, sample_tokens

KERNELS: Sequence[Kernel] = (
    linear_codes.KERNEL,
    linear_bytes.KERNEL,
    linear_dense.KERNEL,
    gate_rows.KERNEL,
    quantize_rows.KERNEL,
    restore_codes.KERNEL,
    normalize_rows.KERNEL,
    rotate_and_store.KERNEL,
    attend_prompts.KERNEL,
    attend_rows.KERNEL,
    attend_tokens_checks.KERNEL,
    sample_tokens.KERNEL,
    loss_rows.KERNEL,
)
