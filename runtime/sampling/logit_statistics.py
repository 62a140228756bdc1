"""Statistics of rows of logits, before a token is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogitStatistics:
    """Statistics of rows of logits, before a token is chosen.

    Attributes:
        best: the most likely token of each row; the first of equals.
        highest: its logit; not finite if the row cannot be sampled from.
        total: the logarithm of the sum of the exponentials of all logits.
    """

    best: list[int]
    highest: list[float]
    total: list[float]

    def is_sound(self, row: int) -> bool:
        """Whether a row can be sampled from: no NaN, and no positive infinity."""
        return math.isfinite(self.highest[row])


def logit_statistics(logits: Tensor) -> LogitStatistics:
    """The statistics of float32 logits ``[rows, vocabulary]``."""
    highest, best = logits.max(-1)
    return LogitStatistics(best.tolist(), highest.tolist(), logits.logsumexp(-1).tolist())
