"""The cost of rounding a model's weights: memory, disk and operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...models.structure.anatomy import BlockAnatomy
from ...models.structure.open_model import OpenModel
from ...quant.blockwise.apply_transforms import Transforms
from ...quant.blockwise.assignment import Treatment
from ...quant.blockwise.embedding import SLICE
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS


class RoundingCost:
    """Estimates the cost of rounding a model's weights.

    Args:
        model: with the weights that are rounded.
        chosen: each linear's treatment.
        transforms: transforms applied before.
        embedding: whether the input embedding is quantized.
    """

    def __init__(
        self, model: OpenModel, chosen: Mapping[str, Treatment], transforms: Transforms, *, embedding: bool
    ) -> None:
        self._model, self._chosen, self._transforms, self._embedding = model, chosen, transforms, embedding

    def of_weights(self) -> Cost:
        """Cost of rounding without text: a portion being rounded, the next one, and a block's results."""
        model, chosen = self._model, self._chosen
        itemsize = 4 if model.is_edited else model.dtype.itemsize
        memory, operations = 0, 0.0
        for index, anatomy in enumerate(model.anatomy.blocks):
            facts = [model.linears[name] for name in anatomy.linears if name in chosen]
            stored = sum(chosen[f.name].scheme.stored_bytes(f.rows, f.columns, f.dtype.itemsize) for f in facts)
            if self._transforms.links:
                portion = model.block_numels[index] * 4
                memory = max(
                    memory, model.block_numels[index] * 3 * 8
                )  # the experiments that show where scales can move
            else:
                groups = ([f"{anatomy.name}.{name}" for name in group.linears] for group in anatomy.groups)
                portion = max((sum(model.linears[n].numel for n in group) for group in groups), default=0) * itemsize
            # A weight rounded whole has float32 copies of itself, its values, their errors and the fit.
            whole = max((f.numel for f in facts if not chosen[f.name].method.by_row), default=0) * 4 * 8
            memory = max(memory, 2 * portion + 2 * stored + whole)
            operations += sum(f.numel for f in facts) * 100.0
        if model.anatomy.head in chosen:
            memory = max(memory, 3 * model.head.numel * itemsize)
        return Cost(int(max(memory, model.embedding_bytes(), self._embedding_bytes())), 0, operations)

    def of_text(self, windows: int, length: int) -> Cost:
        """Cost of rounding block by block over windows of calibration text."""
        model, chosen = self._model, self._chosen
        tokens, itemsize = windows * length, compute_dtype(model.dtype).itemsize
        memory, operations, kept, sequential = 0, 0.0, 0, 0
        for index, anatomy in enumerate(model.anatomy.blocks):
            groups = [self._group(anatomy, group.linears, tokens) for group in anatomy.groups]
            beside = sum(group.beside for group in groups)
            rounding = max((group.memory for group in groups), default=0)
            memory = max(memory, self._block_memory(index, anatomy, rounding, length))
            passes = 1.5 + sum(c.method != "equalize" for c in self._transforms.links)
            if self._compares(anatomy):
                # The unrounded block runs too, and again if transforms change its linears' inputs.
                passes += 1 + bool(beside and self._transforms.links)
                beside += 2 * model.skeleton.hidden_size
            tails = [model.linears[f"{anatomy.name}.{tail.linear}"].columns for tail in anatomy.tails]
            kept = max(kept, model.skeleton.hidden_size + sum(tails) + beside)
            operations += sum(group.operations for group in groups) + 2 * model.block_numels[index] * tokens * passes
            sequential += sum(group.sequential for group in groups)
        head = model.head
        if head.name in chosen:
            matrices = 5 if chosen[head.name].options.reads_unrounded else 2
            hessian = matrices * head.columns * head.columns * 4 if chosen[head.name].method.needs_hessian else 0
            memory = max(memory, head.numel * (2 * head.dtype.itemsize + 4 * 5) + hessian)
            sequential += head.columns
        memory = max(memory, model.embedding_bytes(), self._embedding_bytes())
        by_block = any(treatment.method.by_block for treatment in chosen.values())
        collected = 2 * tokens * model.skeleton.hidden_size * itemsize if by_block else 0
        return Cost(int(memory), int(tokens * kept * itemsize), operations, sequential, collected)

    def _group(self, anatomy: BlockAnatomy, linears: Sequence[str], tokens: int) -> _Group:
        """Cost of linears that read the same input."""
        chosen = self._chosen
        names = [f"{anatomy.name}.{name}" for name in linears]
        mine = [self._model.linears[name] for name in names if name in chosen]
        size, columns = sum(f.numel for f in mine), self._model.linears[names[0]].columns
        if not any(chosen[f.name].method.needs_hessian for f in mine):
            return _Group(size * (4 + 4 + 4 + 2))
        # The weight being rounded, its result and a copy in the stored dtype; the Hessian and its factor, or it
        # and the half in float64 that it is made from.
        memory = size * (4 + 4 + 2) + 2 * columns * columns * 4
        operations = tokens * columns * columns + size * columns + columns**3
        if not any(chosen[f.name].options.reads_unrounded and not f.is_expert for f in mine):
            return _Group(memory, operations, columns)
        # The matrix of differences and its permutation, and the weight's change.
        memory = max(memory, size * (4 + 4 + 4 + 2) + 5 * columns * columns * 4)
        return _Group(memory, operations + 2 * tokens * columns * columns + 4 * size * columns, columns, columns)

    def _block_memory(self, index: int, anatomy: BlockAnatomy, rounding: int, length: int) -> int:
        """The block, plus the larger of rounding one group and one batch's activations inside the block."""
        model, itemsize = self._model, compute_dtype(self._model.dtype).itemsize
        facts, numel = [model.linears[name] for name in anatomy.linears], model.block_numels[index]
        wide = model.is_edited or self._transforms.change_weights
        passing = (
            max(BATCH_TOKENS, length) * (2 * max(f.rows for f in facts) + 2 * max(f.columns for f in facts)) * itemsize
        )
        memory = numel * (itemsize + (4 if wide else 0)) + max(rounding, passing)
        if self._transforms.change_weights:
            memory = max(memory, numel * 3 * 8)  # the experiments in float64 that show where scales can move
        return memory

    def _compares(self, anatomy: BlockAnatomy) -> bool:
        """Whether any rounding in a block compares with the unrounded block."""
        treatments = [self._chosen[name] for name in anatomy.linears if name in self._chosen]
        return any(t.method.by_block or t.options.reads_unrounded for t in treatments)

    def _embedding_bytes(self) -> int:
        """Memory of rounding the embedding: the codes in pieces and whole, and a slice in float64."""
        if not self._embedding:
            return 0
        table = self._model.weights.info(self._model.embedding_key)
        return table.nbytes + 2 * math.prod(table.shape) + SLICE * table.shape[1] * 3 * 8


@dataclass(frozen=True)
class _Group:
    """Cost of rounding linears that read the same input; ``beside`` is the width of the unrounded inputs kept."""

    memory: int
    operations: float = 0.0
    sequential: int = 0
    beside: int = 0
