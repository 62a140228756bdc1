"""Transforms: they change the weights, not the function, so that rounding loses less."""

from __future__ import annotations

from ...system.lazy import later
from .options.awq import AwqOptions
from .options.base import TransformOptions
from .options.clip import ClipOptions
from .options.rotate import RotateOptions
from .options.smooth import SmoothOptions
from .transform import Transform

TRANSFORMS: dict[str, Transform] = {
    "fold_norms": Transform(residual=True),
    "rotate": Transform(RotateOptions, residual=True, rotation=later(__name__, "rotate"), keeps_zeros=False),
    "smooth": Transform(SmoothOptions, link=later(__name__, "smooth")),
    "equalize": Transform(link=later(__name__, "equalize")),
    "awq": Transform(AwqOptions, link=later(__name__, "awq"), range=later(__name__, "awq", "awq_range")),
    "clip": Transform(ClipOptions, range=later(__name__, "clip")),
}

__all__ = ["TRANSFORMS", "Transform", "TransformOptions"]
