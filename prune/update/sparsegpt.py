"""SparseGPT: remove weights column by column; later columns compensate (Frantar and Alistarh, arXiv:2301.00774)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.pattern import Pattern
from ...quant.rounding.columns import column_factor, settle_columns
from ...quant.rounding.options.gptq import AT_A_TIME
from ...quant.rounding.removal import Removal


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
        keep: a pattern; or a share to remove, of each 128 columns; or a mask of kept weights, ``[rows, columns]``,
            chosen by another score. The first two choose, as they go, what costs least once later columns have
            compensated.
        damping: share of the Hessian's mean diagonal added to its diagonal.

    Returns:
        The weight in float32, and notes on deviations.
    """
    backwards = torch.arange(weight.shape[1], device=weight.device).flip(0)
    columns = weight.T.contiguous()[backwards].float()
    notes: list[str] = []
    factor, used = column_factor(hessian, backwards, damping)
    if factor is None:
        # Without a factor nothing can be compensated: then magnitude times input norm decides.
        factor = torch.diag(hessian.diagonal()[backwards].clamp_min(0).sqrt())
        factor.diagonal().clamp_min_(torch.finfo(torch.float32).tiny)
        notes.append(
            f"the removed weights are not compensated: the Hessian is not positive definite even with damping {used:g}"
        )
    elif used != damping:
        notes.append(f"sparsegpt raised its damping from {damping:g} to {used:g}")
    cost = factor.diagonal().square().clone()
    cost[(hessian.diagonal() == 0)[backwards]] = 0.0  # columns that read only zeros go first
    factor /= factor.diagonal().clone()[:, None]
    removal = Removal(keep, cost, backwards, weight.shape[0])
    stays = removal.stays
    settled = settle_columns(
        columns, factor, lambda column, wanted: wanted * stays[column], AT_A_TIME, removal.coming, removal.together
    )
    return settled.flip(0).T.contiguous(), notes
