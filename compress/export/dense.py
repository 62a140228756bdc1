"""Unquantized weights, in the model's compute dtype."""

from __future__ import annotations

from ...models.checkpoint.writer import Entry
from ...system.storage.tensor_files import TensorInfo
from .source import Source, StoredLinear


def dense_entries(source: Source, linear: StoredLinear) -> list[Entry]:
    """The one tensor that stores a linear: its dequantized values."""
    info = TensorInfo(source.dtype, (linear.rows, linear.columns))
    return [(f"{linear.name}.weight", info, lambda: source.matrix(linear.name).dense(source.dtype))]


def dense_notes(source: Source) -> list[str]:
    """What unquantized weights do not keep."""
    rounded = sum(linear.rounds_inputs for linear in source.linears.values())
    return [f"the activations of {rounded} linears were quantized and no longer are"] if rounded else []
