"""Folding removed blocks into the one before them (LaCo; Yang et al., 2024, arXiv:2402.11187)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def merged(kept: Tensor, removed: Iterable[Tensor]) -> Tensor:
    """A parameter of the block that stays, plus what those of the removed ones are apart from it; float32."""
    start = kept.float()
    result = start.clone()
    for other in removed:
        result += other.float() - start
    return result
