"""Importance scores of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from .units import path_scores


@dataclass(frozen=True)
class ExpertFacts:
    """What a score of a layer's experts reads.

    Attributes:
        reached: the tokens of the calibration text that were routed to each.
        added: the norm of each one's outputs on them.
        first_order: the first-order Taylor change from removing each, if gradients were computed.
        matrices: the experts' part of each of their matrices and routers, ``[experts, …]``; loaded on demand.
    """

    reached: Tensor
    added: Tensor
    first_order: Tensor | None
    matrices: Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class ExpertScore:
    """An importance score of experts.

    Attributes:
        compute: returns one value per expert.
        needs_gradients: whether it reads ``first_order``.
        reads_text: whether its values depend on the calibration text.
    """

    compute: Callable[[ExpertFacts], Tensor]
    needs_gradients: bool = False
    reads_text: bool = True


def taylor(facts: ExpertFacts) -> Tensor:
    """The change of the loss from removing the expert, to first order; see :mod:`.taylor`."""
    assert facts.first_order is not None
    return facts.first_order


# A new score is a row here, and its name in settings/experts.py.
EXPERT_SCORES: dict[str, ExpertScore] = {
    "activation": ExpertScore(lambda facts: facts.added),
    "frequency": ExpertScore(lambda facts: facts.reached),
    "taylor": ExpertScore(taylor, needs_gradients=True),
    "path": ExpertScore(lambda facts: path_scores(facts.matrices()), reads_text=False),
}
