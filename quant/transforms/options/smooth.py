"""Options of SmoothQuant."""

from __future__ import annotations

from pydantic import Field

from .base import TransformOptions


class SmoothOptions(TransformOptions):
    """Options of SmoothQuant."""

    strength: float = Field(
        default=0.5, ge=0, le=1, description="How much of the inputs' range moves to the weights (alpha in the paper)."
    )

    @property
    def reads_inputs(self) -> bool:
        return True
