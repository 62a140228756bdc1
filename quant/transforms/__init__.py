"""Transforms: they change the weights, not the function, so that rounding loses less."""

from __future__ import annotations

from ...system.lazy import later
from .options import (
    AwqOptions,
    ClipOptions,
    EqualizeOptions,
    FoldNormsOptions,
    RotateOptions,
    SmoothOptions,
    TransformOptions,
)
from .transform import Transform

TRANSFORMS: dict[str, Transform] = {
    "fold_norms": Transform(FoldNormsOptions, stream=True),
    "rotate": Transform(RotateOptions, stream=True),
    "smooth": Transform(SmoothOptions, link=later(__name__, "smooth")),
    "equalize": Transform(EqualizeOptions, link=later(__name__, "equalize")),
    "awq": Transform(AwqOptions, link=later(__name__, "awq"), range=later(__name__, "awq", "awq_range")),
    "clip": Transform(ClipOptions, range=later(__name__, "clip")),
}

__all__ = ["TRANSFORMS", "Transform", "TransformOptions"]
