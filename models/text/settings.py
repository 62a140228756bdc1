"""Settings common to the recipe's sections about text."""

from __future__ import annotations

from typing import Any

LENGTH_HELP = "Tokens per window; default: 256, or the model's maximum positions if they are fewer."


def fitting_length(section: Any, positions: int | None) -> dict[str, int]:
    """The default length, shortened to a model's maximum positions; empty if the recipe sets the length."""
    if positions is None or positions < 2 or "length" in section.model_fields_set:
        return {}
    return {"length": min(section.length, positions)}
