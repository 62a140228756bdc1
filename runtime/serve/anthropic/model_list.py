"""``/v1/models`` for Anthropic's clients, which send a header that OpenAI's do not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..model.served_model import ServedModel

HEADER = "anthropic-version"


def model_info(model: ServedModel) -> dict[str, Any]:
    """A model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model.longest - 1,
        "max_tokens": model.longest - 1,
        "capabilities": None,
        "lifecycle": "active",
    }


def model_page(models: Sequence[ServedModel]) -> dict[str, Any]:
    """All models, on one page."""
    found = [model_info(model) for model in models]
    return {
        "data": found,
        "has_more": False,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
    }
