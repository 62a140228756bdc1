"""A norm as an operator."""

from __future__ import annotations

from torch import Tensor

from ..decoder.parts.operators import Rowwise
from ..kernels.rows.normalize_rows import WIDEST, Norm, normalize_rows


class GpuNorm:
    """Norms rows in one launch.

    Args:
        norm: the norm.
        plainly: its plain torch version.
    """

    def __init__(self, norm: Norm, plainly: Rowwise) -> None:
        self.norm, self.plainly = norm, plainly

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] > WIDEST:  # three states of a wide model together, which a draft head may norm
            return self.plainly(hidden)
        return normalize_rows(hidden.flatten(0, -2), norm=self.norm)[1].view(hidden.shape)
