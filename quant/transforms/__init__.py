"""Transforms: they change the weights, not the function, so that rounding loses less."""

from __future__ import annotations

from .awq import AwqOptions, awq, awq_range
from .clip import ClipOptions, clip
from .equalize import EqualizeOptions, equalize
from .smooth import SmoothOptions, smooth
from .transform import Transform, TransformOptions
from .turns import FoldNormsOptions, RotateOptions

TRANSFORMS: dict[str, Transform] = {
    "fold_norms": Transform(FoldNormsOptions, stream=True),
    "rotate": Transform(RotateOptions, stream=True),
    "smooth": Transform(SmoothOptions, link=smooth, needs_inputs=True),
    "equalize": Transform(EqualizeOptions, link=equalize),
    "awq": Transform(AwqOptions, link=awq, range=awq_range, needs_inputs=True),
    "clip": Transform(ClipOptions, range=clip),
}

__all__ = ["TRANSFORMS", "Transform", "TransformOptions"]
