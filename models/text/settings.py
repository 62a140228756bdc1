"""What the recipe's sections about text have in common."""

from __future__ import annotations

from typing import Any

LENGTH_HELP = "Tokens a window; absent for 256, or as many as the model has positions if they are fewer."


def fitting_length(section: Any, positions: int | None) -> dict[str, int]:
    """The length of a section's windows for a model of so many positions, if the recipe left it open; else nothing."""
    if positions is None or positions < 2 or "length" in section.model_fields_set:
        return {}
    return {"length": min(section.length, positions)}
