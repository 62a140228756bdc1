"""A step's time with its copies to and from host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..scheduling.swapping import TransferCost
from .work import StepCost, StepWork


@dataclass(frozen=True)
class SwapCost:
    """A device's step times, and the time of each transfer besides: copies do not overlap with computing.

    Attributes:
        cost: of the step's computation.
        transfer: of its copies.
    """

    cost: StepCost
    transfer: TransferCost

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        copies = self.transfer.seconds(work.swapped) if work.swapped else 0.0
        return self.cost.seconds(replace(work, swapped=0)) + copies
