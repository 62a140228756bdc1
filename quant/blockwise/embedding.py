"""The input embedding in 8-bit codes, with one scale per token."""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from ...models.steps.parts import save_part
from ...models.steps.record import LayerRecord, significant
from ...models.structure.open_model import OpenModel
from ..grid import Grid
from ..rounding.nearest import nearest
from ..scheme import Scheme
from ..stored.compressed_tensors import restore

# The only quantized embedding that transformers 5.23 loads. vLLM documents packed codes only, which transformers does not.
EMBEDDING = Scheme(
    "W8 by token",
    QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.CHANNEL),
    None,
    "int-quantized",
)
# Rows that are rounded at once.
SLICE = 4096


def embedding_saving(model: OpenModel) -> int:
    """Bytes that rounding the embedding saves in a checkpoint."""
    table = model.weights.info(model.embedding_key)
    return table.nbytes - EMBEDDING.stored_bytes(table.shape[0], table.shape[1], table.dtype.itemsize)


def round_embedding(model: OpenModel, tokens: Tensor | None, part: Path) -> None:
    """Write the rounded embedding as a part of the checkpoint.

    Args:
        model: whose.
        tokens: the calibration text; a token's error is weighted by its count there, or by one if no text was read.
        part: the file to write.
    """
    key = model.embedding_key
    table, stored = model.weights.load(key), model.weights.info(key).dtype
    often = torch.ones(len(table), dtype=torch.float64)
    if tokens is not None:
        often = torch.bincount(tokens.flatten(), minlength=len(table)).double()
    pieces: list[dict[str, Tensor]] = []
    lost = whole = 0.0
    for start in range(0, len(table), SLICE):  # rows are independent, and a float32 copy would be large
        rows, counts = table[start : start + SLICE], often[start : start + SLICE]
        grid = Grid.fit(rows.float(), EMBEDDING.args, stored)
        pieces.append(nearest(rows, EMBEDDING.args, grid=grid).stored(EMBEDDING))
        difference = restore(pieces[-1], EMBEDDING).double() - rows.double()
        lost += float(difference.square().sum(1) @ counts)
        whole += float(rows.double().square().sum(1) @ counts)
    prefix = key.removesuffix("weight")
    codes = {prefix + name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    error = significant((lost / whole) ** 0.5 if whole else None, 6)
    shape = (table.shape[0], table.shape[1])
    of = "weights" if tokens is None else "outputs"
    save_part(part, codes, [LayerRecord(key.removesuffix(".weight"), shape, EMBEDDING.label, error, error_of=of)])


def restored_embedding(stored: dict[str, Tensor]) -> Tensor:
    """The embedding restored from a part."""
    return restore({name.rpartition(".")[2]: tensor for name, tensor in stored.items()}, EMBEDDING)
