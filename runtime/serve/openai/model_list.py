"""``/v1/models``, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from typing import Any

from ..model.served_model import ServedModel


def model_entry(model: ServedModel) -> dict[str, Any]:
    """A model in OpenAI's form, with vLLM's additional fields. Where it lies is nobody's business."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "smelt",
        "root": model.name,
        "parent": None if model.base is None else model.base.name,
        "max_model_len": model.longest,
    }
