"""The best choice of one candidate for each unit within a budget, as an integer programme."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

# HiGHS takes an objective for optimal that is within 1e-6 of the best bound, so losses are made large.
_LARGEST_OBJECTIVE = 1e8


def best_choice(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], budget: int) -> list[int] | None:
    """For each unit the candidate that makes the summed loss smallest while the summed cost stays in the budget.

    Args:
        losses: by unit and candidate, not negative.
        costs: likewise, in whole numbers.
        budget: the largest sum of costs.

    Returns:
        A candidate's place for each unit; None if even the cheapest candidates cost more than the budget.
    """
    left = budget - sum(min(unit) for unit in costs)
    if left < 0:
        return None
    # Only what a candidate costs beyond the cheapest counts, and in the largest unit that divides all: small whole
    # numbers, which the solver's tolerance cannot mistake.
    extra = [[cost - min(unit) for cost in unit] for unit in costs]
    step = math.gcd(*(cost for unit in extra for cost in unit)) or 1
    owner = np.repeat(np.arange(len(costs)), [len(unit) for unit in costs])
    weights = np.array([cost // step for unit in extra for cost in unit], dtype=float)
    objective = np.array([loss - min(unit) for unit in losses for loss in unit])
    objective *= _LARGEST_OBJECTIVE / max(objective.max(), np.finfo(float).tiny)
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
        allowed -= max(1, allowed // 10**6)  # the solver took a sum for allowed that exceeds the budget by rounding


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep what HiGHS prints in spite of its options out of this process's output."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
