"""The best choice of one candidate per unit within a budget, as an integer program."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ...system.errors import SmeltError

# HiGHS accepts an objective within 1e-6 of the best bound as optimal, so losses are scaled up.
_LARGEST_OBJECTIVE = 1e8


def best_choice(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], budget: int) -> list[int] | None:
    """The candidate of each unit that minimizes the total loss with the total cost within the budget.

    Args:
        losses: by unit and candidate, not negative.
        costs: likewise, as integers.
        budget: the largest sum of costs.

    Returns:
        A candidate's index for each unit; None if even the cheapest candidates cost more than the budget.
    """
    left = budget - sum(min(unit) for unit in costs)
    if left < 0:
        return None
    # Costs are taken relative to the cheapest candidate and divided by their greatest common divisor: small integers,
    # which the solver's tolerance cannot confuse.
    extra = [[cost - min(unit) for cost in unit] for unit in costs]
    step = math.gcd(*(cost for unit in extra for cost in unit)) or 1
    owner = np.repeat(np.arange(len(costs)), [len(unit) for unit in costs])
    weights = np.array([cost // step for unit in extra for cost in unit], dtype=float)
    objective = np.array([loss - min(unit) for unit in losses for loss in unit])
    if not np.isfinite(objective).all():
        raise SmeltError(
            "scheme auto: the losses that were measured are not finite; the model or its calibration text is broken"
        )
    if objective.max() > 0:
        objective *= _LARGEST_OBJECTIVE / objective.max()
    one_each = (np.arange(len(costs))[:, None] == owner[None, :]).astype(float)
    allowed = left // step
    while True:
        with _nothing_printed():
            found = milp(
                objective,
                integrality=np.ones(len(owner)),
                bounds=Bounds(0, 1),
                constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weights[None, :], -np.inf, allowed)],
                options={"mip_rel_gap": 0.0},
            )
        if found.x is None:
            raise ValueError(f"the integer programme could not be solved: {found.message}")
        starts = np.cumsum([0, *(len(unit) for unit in costs)])
        chosen = [int(found.x[a:b].argmax()) for a, b in itertools.pairwise(starts)]
        spent = sum(unit[place] for unit, place in zip(extra, chosen, strict=True))
        if spent <= left:
            return chosen
        allowed -= max(1, allowed // 10**6)  # the solver's tolerance accepted a sum above the budget


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Suppress what HiGHS prints despite its options."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
