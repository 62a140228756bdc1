"""Folding removed blocks into the one before them (LaCo; Yang et al., 2024, arXiv:2402.11187)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def merged(kept: Tensor, removed: Iterable[Tensor]) -> Tensor:
    """A parameter of the kept block, plus the removed ones' differences from it; float32."""
    start = kept.float()
    result = start.clone()
    for other in removed:
        result += other.float() - start
    return result
