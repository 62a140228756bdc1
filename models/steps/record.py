"""What a step reports of each layer that it changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class LayerRecord:
    """The record of one quantized layer.

    Attributes:
        name: its full name.
        shape: rows and columns.
        scheme: what it is stored as.
        error: relative quantization error; None if no calibration token reached it.
        notes: sentences about anything that did not go as planned.
        error_of: what ``error`` measures: the layer's outputs on calibration inputs, or its weights.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    error: float | None
    notes: list[str] = field(default_factory=list)
    error_of: Literal["outputs", "weights"] = "outputs"

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "scheme": self.scheme,
            "error": self.error,
            "error_of": self.error_of,
            "notes": self.notes,
        }

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> LayerRecord:
        """The inverse of :meth:`as_data`."""
        return cls(**{**data, "shape": tuple(data["shape"])})


def significant(error: float | None, digits: int = 4) -> float | None:
    """An error as it is recorded: further digits would differ from machine to machine."""
    return None if error is None else float(f"{error:.{digits}g}")
