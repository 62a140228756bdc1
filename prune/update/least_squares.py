"""The least-squares update: the remaining columns compensate for the removed ones."""

from __future__ import annotations

import torch
from torch import Tensor


def refitted(reader: Tensor, hessian: Tensor, kept: Tensor, damping: float = 0.01) -> tuple[Tensor, list[str]]:
    """The remaining columns, refitted so that outputs on the calibration inputs change least.

    The least-squares solution ``W H[:, S] H[S, S]^-1`` for the kept columns ``S``.

    Args:
        reader: ``[rows, columns]``.
        hessian: mean of x xT over calibration inputs, ``[columns, columns]``.
        kept: the kept columns.
        damping: share of the mean diagonal that is added to it; raised tenfold, at most twice, if needed.

    Returns:
        The columns in float32, and notes on deviations.
    """
    inner, wanted = hessian[kept[:, None], kept].double(), reader.double() @ hessian[:, kept].double()
    mean = inner.diagonal().mean()
    for _ in range(3):
        # Damped towards the original columns, not towards zero.
        shift = damping * mean
        damped = inner.clone()
        damped.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(
            damped, out=(damped, torch.empty((), dtype=torch.int32, device=inner.device))
        )
        if not failed and mean > 0:
            found = torch.cholesky_solve((wanted + shift * reader[:, kept].double()).T, factor).T
            return found.float(), []
        damping *= 10
    return reader[:, kept].float(), ["the removed columns are not compensated: the Hessian cannot be factored"]
