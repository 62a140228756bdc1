"""Options of clipping."""

from __future__ import annotations

from pydantic import Field

from .base import TransformOptions


class ClipOptions(TransformOptions):
    """Options of clipping."""

    least: float = Field(default=0.5, gt=0, lt=1, description="Smallest fraction of a group's range that is tried.")
    steps: int = Field(default=10, ge=1, description="Number of fractions tried.")

    @property
    def reads_inputs(self) -> bool:
        return True
