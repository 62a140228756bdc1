"""How much channels matter, and what the rest do to make up for those that go."""

from __future__ import annotations

import torch
from torch import Tensor


def channel_scores(score: str, reader: Tensor, energy: Tensor) -> Tensor:
    """One number for each channel.

    Args:
        score: ``activation``: the channel's norm over the calibration text (Muralidharan et al., 2024, arXiv:2407.14679);
            ``wanda``: that times the norm of the column that reads it, so its share of the outputs; ``weight``: the
            column's norm alone, without looking at any text.
        reader: the weight that reads the channels, ``[rows, channels]``.
        energy: each channel's mean square.
    """
    columns, norms = reader.float().norm(dim=0), energy.float().sqrt()
    return {"activation": norms, "wanda": norms * columns, "weight": columns}[score]


def refitted(reader: Tensor, hessian: Tensor, kept: Tensor, damping: float = 0.01) -> tuple[Tensor, list[str]]:
    """The columns that are left, so that outputs on the calibration inputs come closest to what they were.

    The least-squares solution ``W H[:, S] H[S, S]^-1`` for the channels ``S`` that stay.

    Args:
        reader: ``[rows, channels]``.
        hessian: mean of x xT over calibration inputs, ``[channels, channels]``.
        kept: the channels that stay.
        damping: share of the mean diagonal that is added to it; it grows tenfold, twice at most, while it must.

    Returns:
        The columns in float32, and notes on what did not go as planned.
    """
    inner, wanted = hessian[kept[:, None], kept].double(), reader.double() @ hessian[:, kept].double()
    mean = inner.diagonal().mean()
    for _ in range(3):
        # Damped towards the columns as they are, not towards zero.
        shift = damping * mean
        damped = inner + shift * torch.eye(len(kept), dtype=torch.float64, device=inner.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed and mean > 0:
            found = torch.cholesky_solve((wanted + shift * reader[:, kept].double()).T, factor).T
            return found.float(), []
        damping *= 10
    return reader[:, kept].float(), ["nothing makes up for the channels that went: its Hessian cannot be factored"]
