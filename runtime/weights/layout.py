"""Where a stored linear's outputs and inputs are in its tensors, so that a part of it can be read alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Ranges = Sequence[range]


@dataclass(frozen=True)
class StoredAxis:
    """A dimension of a tensor.

    Attributes:
        dim: which.
        values: how many outputs, or inputs, belong together.
        elements: how many elements hold them.
    """

    dim: int
    values: int = 1
    elements: int = 1

    @classmethod
    def packed(cls, dim: int, bits: int) -> StoredAxis:
        """Codes that fill words of 32 bits without a gap."""
        common = math.gcd(32, bits)
        return cls(dim, 32 // common, bits // common)

    def place(self, values: range) -> range:
        """The elements of some outputs or inputs; they begin and end where a group does, or where all end."""
        return range(values.start // self.values * self.elements, -(-values.stop * self.elements // self.values))


@dataclass(frozen=True)
class PartLayout:
    """One tensor: where its outputs and inputs are; None for a dimension that has all of them in one element."""

    rows: StoredAxis | None = None
    columns: StoredAxis | None = None


@dataclass(frozen=True)
class Layout:
    """The tensors of a linear.

    Attributes:
        rows: its outputs.
        columns: its inputs.
        parts: by local name.
        in_order: whether groups are of neighbouring inputs; otherwise inputs cannot be cut.
        rounded: how many inputs are rounded together, besides all of them.
    """

    rows: int
    columns: int
    parts: Mapping[str, PartLayout] = field(default_factory=dict)
    in_order: bool = True
    rounded: int = 1

    @property
    def row_unit(self) -> int:
        """How many outputs can only be read together."""
        return math.lcm(*(part.rows.values for part in self.parts.values() if part.rows is not None))

    @property
    def column_unit(self) -> int | None:
        """How many inputs can only be read together; None if all."""
        if not self.in_order:
            return None
        stored = (part.columns.values for part in self.parts.values() if part.columns is not None)
        return math.lcm(self.rounded, *stored)


def axis_of(dim: int, elements: int, values: int, block: int | None = None) -> StoredAxis | None:
    """A dimension whose elements are each for as many outputs or inputs; None for one that is for all.

    Args:
        dim: which.
        elements: its size.
        values: how many outputs, or inputs, there are.
        block: how many an element is for, where the last one may be for fewer.
    """
    if elements == values:
        return StoredAxis(dim)
    return None if elements <= 1 else StoredAxis(dim, block or values // elements)


@dataclass(frozen=True)
class Cut:
    """A part of a linear.

    Attributes:
        rows: outputs; None for all.
        columns: inputs; None for all.
    """

    rows: Ranges | None = None
    columns: range | None = None
