"""Scores of a layer's units.

A unit is a channel, or all channels of some attention heads: contiguous columns of the matrix that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class UnitFacts:
    """Inputs of a score of a layer's units.

    Attributes:
        reader: the weight that reads the units, ``[rows, units x columns]``.
        columns: columns per unit.
        energy: each channel's mean square on the calibration text.
        first_order: the first-order Taylor change from removing each unit, if gradients were computed.
        matrices: the units' part of each matrix that writes or reads them, ``[units, …]``; loaded on demand.
    """

    reader: Tensor
    columns: int = 1
    energy: Tensor | None = None
    first_order: Tensor | None = None
    matrices: Callable[[], Iterable[Tensor]] = tuple


@dataclass(frozen=True)
class UnitScore:
    """An importance score of units.

    Attributes:
        compute: returns one value per unit.
        needs_gradients: whether it reads ``first_order``.
    """

    compute: Callable[[UnitFacts], Tensor]
    needs_gradients: bool = False


def activation(facts: UnitFacts) -> Tensor:
    """The unit's norm over the calibration text (Muralidharan et al., 2024, arXiv:2407.14679)."""
    return _norms(facts, _energy(facts))


def wanda(facts: UnitFacts) -> Tensor:
    """Each channel's norm times that of the column that reads it, so the unit's contribution to the outputs."""
    return _norms(facts, _column_squares(facts) * _energy(facts))


def weight(facts: UnitFacts) -> Tensor:
    """The norm of the columns that read the unit; reads no text."""
    return _norms(facts, _column_squares(facts))


def taylor(facts: UnitFacts) -> Tensor:
    """The change of the loss from removing the unit, to first order; see :mod:`.taylor`."""
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
    """One value per unit: the product of the norms of the weights that write and read it; reads no text.

    For random inputs, that is the size of the unit's contribution, up to a factor common to all units.

    Args:
        matrices: the units' part of each matrix, ``[units, …]``.
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
