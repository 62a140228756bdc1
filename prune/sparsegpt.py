"""SparseGPT: remove weights column by column; those still to come make up for it (Frantar and Alistarh, arXiv:2301.00774)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.rounding.columns import column_factor, settle_columns
from .masks import Pattern, keep_share

# The paper decides about this many columns at a time where there is no pattern.
AT_A_TIME = 128


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    keep: Pattern | float | Tensor,
    damping: float = 0.01,
) -> tuple[Tensor, list[str]]:
    """Remove weights so that the layer's outputs on the calibration inputs change least.

    Args:
        weight: ``[rows, columns]``.
        hessian: mean of x xT over calibration inputs.
        keep: a pattern; or a share to remove, of each 128 columns; or which stay, ``[rows, columns]``, if
            another score has chosen them. The first two choose, as they go, what costs least once later columns
            have made up for it.
        damping: share of the Hessian's mean diagonal added to its diagonal.

    Returns:
        The weight in float32, and notes on what did not go as planned.
    """
    backwards = torch.arange(weight.shape[1], device=weight.device).flip(0)
    columns = weight.T.contiguous()[backwards].float()
    notes: list[str] = []
    factor, used = column_factor(hessian, backwards, damping)
    if factor is None:
        # Without it nothing can be made up for: then size times input decides.
        factor = torch.diag(hessian.diagonal()[backwards].clamp_min(0).sqrt())
        factor.diagonal().clamp_min_(torch.finfo(torch.float32).tiny)
        notes.append(
            f"nothing makes up for what was removed: its Hessian is not positive definite even with damping {used:g}"
        )
    elif used != damping:
        notes.append(f"sparsegpt raised its damping from {damping:g} to {used:g}")
    cost = factor.diagonal().square()[:, None].clone()
    cost[(hessian.diagonal() == 0)[backwards]] = 0.0  # what reads nothing but zeros goes first
    factor /= factor.diagonal().clone()[:, None]
    stays = torch.zeros_like(columns, dtype=torch.bool)
    if isinstance(keep, Tensor):
        stays |= keep.T[backwards]

    def choose(part: slice, wanted: Tensor) -> None:
        score = (wanted.square() * cost[part]).T
        if isinstance(keep, Pattern):
            stays[part] = keep.keep(score).T
        else:
            assert isinstance(keep, float)
            stays[part] = keep_share(score, keep, by_row=False).T

    together = keep.of if isinstance(keep, Pattern) else AT_A_TIME
    settled = settle_columns(
        columns,
        factor,
        lambda column, wanted: wanted * stays[column],
        AT_A_TIME,
        None if isinstance(keep, Tensor) else choose,
        together,
    )
    return settled.flip(0).T.contiguous(), notes
