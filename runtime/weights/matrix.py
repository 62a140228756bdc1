"""A linear layer's weight as a checkpoint stores it, before any kernel has packed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...quant.activations import ActivationRounding
from ...quant.stored.codes import Codes
from ...system.hardware.pages import joined_in_large_pages
from .rounding import alike


@dataclass(frozen=True)
class FloatCodes:
    """The bits of a weight of 4- or 8-bit floats, for kernels that multiply them as they are stored.

    Attributes:
        codes: e4m3 ``[rows, columns]``, or two e2m1 values per byte ``[rows, columns / 2]``, the low four bits first.
        scale: ``[rows / height, groups]``; e8m0 is its bits as uint8.
        height: rows that share a scale.
        factor: float32 ``[rows]``, an additional scale; None for ones.
    """

    codes: Tensor
    scale: Tensor
    height: int = 1
    factor: Tensor | None = None

    def rows(self, index: Tensor) -> FloatCodes:
        """The same with selected and reordered rows."""
        factor, each = None if self.factor is None else self.factor[index], self.by_row().scale
        codes, scale = bits(self.codes)[index].view(self.codes.dtype), bits(each)[index].view(each.dtype)
        return FloatCodes(codes, scale, 1, factor)

    def by_row(self) -> FloatCodes:
        """The same with separate scales for each row."""
        scale = bits(self.scale).repeat_interleave(self.height, 0)[: self.codes.shape[0]].view(self.scale.dtype)
        return FloatCodes(self.codes, scale, 1, self.factor)

    @staticmethod
    def stacked(parts: Sequence[FloatCodes | None]) -> FloatCodes | None:
        """Several as one; None if they are not alike."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        if any(part.codes.shape[0] % part.height for part in known):
            known = [part.by_row() for part in known]
        first = known[0]
        alike = all(
            p.codes.dtype == first.codes.dtype
            and p.scale.dtype == first.scale.dtype
            and p.scale.shape[1] == first.scale.shape[1]
            and p.height == first.height
            and (p.factor is None) == (first.factor is None)
            for p in known
        )
        if not alike:
            return None
        factor = None if first.factor is None else torch.cat([p.factor for p in known if p.factor is not None])
        codes, scale = (torch.cat([bits(t) for t in ts]) for ts in ([p.codes for p in known], [p.scale for p in known]))
        return FloatCodes(codes.view(first.codes.dtype), scale.view(first.scale.dtype), first.height, factor)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as bytes where torch cannot stack or index the dtype."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


@dataclass(frozen=True)
class Matrix:
    """A weight ``[rows, columns]``: its values, or integer codes with scales.

    Attributes:
        values: the weight itself, or int8 codes.
        format: the number format's name, for messages: ``bfloat16``, ``int4 g128``, ``float8``…
        bits: of each code, or of each value.
        scale: ``[rows, groups]``, with codes only; groups are of equal size along the columns.
        zero: ``[rows, groups]``, subtracted from codes; None if symmetric.
        inputs: how the layer's inputs are rounded at run time; None if they are not.
        order: which input each column of ``values`` is for; None if in the inputs' order.
        floats: the bits of 4- and 8-bit floats, of which ``values`` holds the restored values.
        widens: whether scales are float32 when computing in float32, as transformers loads those of compressed-tensors.
    """

    values: Tensor
    format: str
    bits: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    inputs: ActivationRounding | None = None
    order: Tensor | None = None
    floats: FloatCodes | None = None
    widens: bool = False

    @classmethod
    def plain(cls, values: Tensor, inputs: ActivationRounding | None = None, format: str | None = None) -> Matrix:
        """An unquantized weight."""
        name = format or str(values.dtype).removeprefix("torch.")
        return cls(values, name, 8 * values.element_size(), inputs=inputs)

    @property
    def is_plain(self) -> bool:
        """Whether it is unquantized."""
        return self.scale is None and self.floats is None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.values.shape[1] if self.scale is None else self.values.shape[1] // self.scale.shape[1]

    def rows(self, index: Tensor) -> Matrix:
        """The same matrix with the rows ``index``."""
        return replace(
            self,
            values=self.values[index],
            scale=None if self.scale is None else self.scale[index],
            zero=None if self.zero is None else self.zero[index],
            floats=None if self.floats is None else self.floats.rows(index),
        )

    def codes(self) -> Codes:
        """The integer codes, with columns in the inputs' order."""
        assert self.scale is not None
        if self.order is None:
            return Codes(self.values, self.bits, self.scale, self.zero)
        back = self.order.argsort()
        places = torch.arange(len(back), dtype=torch.int32) // self.group
        return Codes(self.values[:, back], self.bits, self.scale, self.zero, places[back])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values, from any storage format.

        Computed in the scale's type; where it ``widens``, in float32 if ``dtype`` is that.
        """
        if self.scale is None:
            return self.values.to(dtype)
        scale = self.scale.float() if self.widens and dtype == torch.float32 else self.scale
        codes = self.values.to(scale.dtype).unflatten(1, (scale.shape[1], -1))
        if self.zero is not None:
            codes = codes - self.zero.to(scale.dtype).unsqueeze(-1)
        values = (codes * scale.unsqueeze(-1)).flatten(1).to(dtype)
        return values if self.order is None else values[:, self.order.argsort()]


def see_the_same(parts: Sequence[Matrix]) -> bool:
    """Whether linears with the same inputs round them alike."""
    return all(alike(part.inputs, parts[0].inputs) for part in parts)


def stacked(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Matrices with the same columns, stacked. Those of one format keep it, others are restored to plain values.

    All must have their inputs rounded alike.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    assert see_the_same(parts)
    stored_alike = all(
        p.format == first.format
        and p.group == first.group
        and (p.scale is None) == (first.scale is None)
        and (p.zero is None) == (first.zero is None)
        and (p.order is first.order or (p.order is not None and first.order is not None and p.order.equal(first.order)))
        for p in parts
    )
    if not stored_alike:
        return Matrix.plain(torch.cat([p.dense(dtype) for p in parts]), first.inputs)
    return replace(
        first,
        values=joined_in_large_pages([p.values for p in parts]),
        scale=None if first.scale is None else torch.cat([p.scale for p in parts if p.scale is not None]),
        zero=None if first.zero is None else torch.cat([p.zero for p in parts if p.zero is not None]),
        floats=FloatCodes.stacked([p.floats for p in parts]),
    )
