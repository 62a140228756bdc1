"""What every step's section of a recipe answers."""

from __future__ import annotations


class StepSettings:
    """Base of steps' sections."""

    def calibration_problem(self, samples: int) -> str | None:
        """What is wrong with this many calibration windows, beginning with the name of a field; None if they suffice."""
        return None
