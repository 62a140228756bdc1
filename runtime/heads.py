"""The shape of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """The attention of one layer.

    Attributes:
        queries, shared: how many query heads and key-value heads.
        size: of a head.
        scale: the factor of scores.
        window: how many positions back a token sees, itself included; None for all.
        cap: a soft cap on scores.
    """

    queries: int
    shared: int
    size: int
    scale: float
    window: int | None
    cap: float | None

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.queries // self.shared
