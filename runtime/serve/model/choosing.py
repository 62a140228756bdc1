"""How tokens are chosen: what a request says, and what its model's maker says where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HowChosen(Protocol):
    """What every API's request has; None where it does not say."""

    temperature: float | None
    top_k: int | None
    top_p: float | None


def chosen(request: HowChosen | None, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Fields of the engine's parameters.

    Args:
        request: whose fields come first; None for the defaults alone.
        defaults: the model's.
    """

    def of(name: str, otherwise: float) -> Any:
        given = getattr(request, name, None)
        return defaults.get(name, otherwise) if given is None else given

    top_p = of("top_p", 1.0)
    return {
        "temperature": of("temperature", 1.0),
        # Of no probability at all there is the most likely token.
        "top_k": 1 if top_p == 0 else int(of("top_k", 0)),
        "top_p": top_p or 1.0,
        "min_p": of("min_p", 0.0),
        "repetition_penalty": of("repetition_penalty", 1.0),
    }
