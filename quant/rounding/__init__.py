"""Rounding: one function of tensors a method, and what it needs to know of the layer's inputs."""

from __future__ import annotations

from ...system.lazy import later
from .method import Method
from .options import GptqOptions, HqqOptions, NearestOptions, RoundingOptions, SignroundOptions

_nearest = later(__name__, "nearest")

METHODS: dict[str, Method] = {
    "nearest": Method(_nearest, NearestOptions, needs_hessian=False, by_row=True),
    "gptq": Method(later(__name__, "gptq"), GptqOptions, needs_hessian=True),
    "hqq": Method(later(__name__, "hqq"), HqqOptions, needs_hessian=False),
    "signround": Method(_nearest, SignroundOptions, needs_hessian=False, by_block=True),
}

__all__ = ["METHODS", "Method", "RoundingOptions"]
