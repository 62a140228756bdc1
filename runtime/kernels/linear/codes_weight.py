"""A matrix of codes, packed for :mod:`linear_codes`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .finish import is_gated
from .packing import FORMATS, ROWS, SPAN, interleaved, kernel_group, pack, pack_scales
from .start import Weight


@dataclass(frozen=True)
class CodesWeight(Weight):
    """A packed matrix, or one for each expert.

    Attributes:
        form: which of :data:`FORMATS`.
        codes, more: fragments; ``more`` is the second plane of formats that have two, of ``nested8`` that of the lower bits.
        kind, group, scale_type: of the group scales; kind ``none`` if there are none.
        scales: their words.
        row_scales: float32, one for each row; None if there are none.
        bias: one for each row, in the rows' packed order.
    """

    rows: int
    columns: int
    form: str
    codes: Tensor
    more: Tensor | None
    kind: str
    group: int
    scale_type: torch.dtype
    scales: Tensor | None
    row_scales: Tensor | None
    bias: Tensor | None
    gate: str
    experts: int

    def upper(self) -> CodesWeight:
        """The upper four bits of ``nested8``, in the same memory, each as the middle of the codes that begin with them."""
        assert self.form == "nested8"
        return replace(self, form="upper4", more=None)


def prepare(
    codes: Tensor,
    form: str,
    *,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: str = "none",
) -> CodesWeight:
    """Pack a matrix for :func:`linear_codes`.

    Args:
        codes: ``[rows, columns]``: signed integers, or the bits of floats.
        form: one of :data:`FORMATS`.
        scale: ``[rows, groups]``; see :func:`pack_scales`.
        zero: ``[rows, groups]``; None if symmetric.
        row_scale: ``[rows]``, an additional scale.
        bias: ``[rows]``.
        gate: ``silu`` or ``gelu_tanh`` if the first half of the rows is a gate for the second; with ``alone_``
            before it (also ``relu`` and ``gelu``), an activation of all rows.

    Raises:
        ValueError: the kernel does not support it.
    """
    rows, columns = codes.shape
    if zero is not None and form == "sparse4":
        raise ValueError("2:4 sparse weights with zero-points are not supported: a pruned weight would not be zero")
    if is_gated(gate):
        order = interleaved(rows).to(codes.device)
        codes = codes[order]
        scale, zero, row_scale, bias = (
            None if part is None else part[order] for part in (scale, zero, row_scale, bias)
        )
    if -(-rows // ROWS) * ROWS * -(-columns // SPAN) * SPAN * FORMATS[form].bits // 16 >= 1 << 31:
        raise ValueError(f"a weight of {rows} by {columns} has more words than 32-bit indices can address")
    planes = pack(codes, form)
    kind, group, words, scale_type = "none", 128, None, torch.float32
    if scale is not None:
        if columns % scale.shape[1]:
            raise ValueError(f"{columns} columns do not divide into {scale.shape[1]} groups")
        whole = columns // scale.shape[1]
        if form == "sparse4" and whole % 64:
            raise ValueError(f"2:4 sparse weights in groups of {whole}; the kernel takes multiples of 64")
        kind, words = pack_scales(scale, zero, whole)
        group, scale_type = kernel_group(whole) or 0, scale.dtype
    filled = -(-rows // ROWS) * ROWS
    if row_scale is not None:
        row_scale = torch.nn.functional.pad(row_scale.float().flatten(), (0, filled - rows)).contiguous()
    return CodesWeight(
        rows,
        columns,
        form,
        planes[0],
        planes[1] if len(planes) > 1 else None,
        kind,
        group,
        scale_type,
        words,
        row_scale,
        None if bias is None else bias.contiguous(),
        gate,
        0,
    )
