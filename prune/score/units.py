"""How much units of a layer matter, and what the rest do to make up for those that go.

A unit is a channel, or all channels of some attention heads: neighbouring columns of the matrix that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitFacts:
    """What a score may read of a layer's units.

    Attributes:
        reader: the weight that reads the units, ``[rows, units x columns]``.
        columns: how many a unit has.
        energy: each channel's mean square on the calibration text.
        first_order: what removing each unit would change by first-order Taylor expansion, where gradients were taken.
        matrices: of each matrix that writes or reads the units, what belongs to them, ``[units, …]``; read when asked for.
    """

    reader: Tensor
    columns: int = 1
    energy: Tensor | None = None
    first_order: Tensor | None = None
    matrices: Callable[[], Iterable[Tensor]] = tuple


@dataclass(frozen=True)
class UnitScore:
    """A way to say how much units matter.

    Attributes:
        compute: one number for each unit.
        needs_gradients: whether it reads ``first_order``.
    """

    compute: Callable[[UnitFacts], Tensor]
    needs_gradients: bool = False


def activation(facts: UnitFacts) -> Tensor:
    """The unit's norm over the calibration text (Muralidharan et al., 2024, arXiv:2407.14679)."""
    return _norms(facts, _energy(facts))


def wanda(facts: UnitFacts) -> Tensor:
    """Each channel's norm times that of the column that reads it, so the unit's share of the outputs."""
    return _norms(facts, _column_squares(facts) * _energy(facts))


def weight(facts: UnitFacts) -> Tensor:
    """The norm of the columns that read the unit, without looking at any text."""
    return _norms(facts, _column_squares(facts))


def taylor(facts: UnitFacts) -> Tensor:
    """What removing the unit changes the loss by, to first order; see :mod:`.taylor`."""
    assert facts.first_order is not None
    return facts.first_order


def path(facts: UnitFacts) -> Tensor:
    """See :func:`path_scores`."""
    return path_scores(facts.matrices())


# A new score is a row here, and its name in settings/units.py.
UNIT_SCORES: dict[str, UnitScore] = {
    "activation": UnitScore(activation),
    "wanda": UnitScore(wanda),
    "taylor": UnitScore(taylor, needs_gradients=True),
    "weight": UnitScore(weight),
    "path": UnitScore(path),
}


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


def _norms(facts: UnitFacts, squares: Tensor) -> Tensor:
    return squares.unflatten(0, (-1, facts.columns)).sum(-1).sqrt()


def _column_squares(facts: UnitFacts) -> Tensor:
    return facts.reader.float().square().sum(0)


def _energy(facts: UnitFacts) -> Tensor:
    assert facts.energy is not None
    return facts.energy.float().to(facts.reader.device)


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
    return reader[:, kept].float(), ["the removed columns are not compensated: the Hessian cannot be factored"]
