"""How much units of a layer matter, and what the rest do to make up for those that go.

A unit is a channel, or all channels of some attention heads: neighbouring columns of the matrix that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def unit_scores(score: str, reader: Tensor, energy: Tensor | None, columns: int = 1) -> Tensor:
    """One number for each unit.

    Args:
        score: ``activation``: the unit's norm over the calibration text (Muralidharan et al., 2024, arXiv:2407.14679);
            ``wanda``: each channel's times the norm of the column that reads it, so the unit's share of the outputs;
            ``weight``: the norm of those columns alone, without looking at any text.
        reader: the weight that reads the units, ``[rows, units x columns]``.
        energy: each channel's mean square; not needed for ``weight``.
        columns: how many a unit has.
    """
    squares = torch.ones(reader.shape[1], device=reader.device)
    if score != "activation":
        squares = squares * reader.float().square().sum(0)
    if score != "weight":
        assert energy is not None
        squares = squares * energy.float().to(reader.device)
    return squares.unflatten(0, (-1, columns)).sum(-1).sqrt()


def path_scores(matrices: Iterable[Tensor]) -> Tensor:
    """One number for each unit: the product of the norms of all that writes and reads it, without looking at any text.

    Where inputs are random, that is the size of what the unit adds, up to a factor that all units share.

    Args:
        matrices: of each matrix, what belongs to the units, ``[units, …]``.
    """
    total: Tensor | None = None
    for each in matrices:
        logs = each.float().flatten(1).norm(dim=1).clamp_min(1e-30).log()
        total = logs if total is None else total + logs
    assert total is not None
    return total.exp()


def refitted(reader: Tensor, hessian: Tensor, kept: Tensor, damping: float = 0.01) -> tuple[Tensor, list[str]]:
    """The columns that are left, so that outputs on the calibration inputs come closest to what they were.

    The least-squares solution ``W H[:, S] H[S, S]^-1`` for the columns ``S`` that stay.

    Args:
        reader: ``[rows, columns]``.
        hessian: mean of x xT over calibration inputs, ``[columns, columns]``.
        kept: the columns that stay.
        damping: share of the mean diagonal that is added to it; it grows tenfold, twice at most, while it must.

    Returns:
        The columns in float32, and notes on what did not go as planned.
    """
    inner, wanted = hessian[kept[:, None], kept].double(), reader.double() @ hessian[:, kept].double()
    mean = inner.diagonal().mean()
    for _ in range(3):
        # Damped towards the columns as they are, not towards zero.
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
    return reader[:, kept].float(), ["nothing makes up for what went: its Hessian cannot be factored"]
