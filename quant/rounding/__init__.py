"""Rounding: one function of tensors per method, and the input statistics that it needs."""

from __future__ import annotations

from ...system.lazy import later
from .method import Method
from .options.base import RoundingOptions
from .options.gptq import GptqOptions
from .options.hqq import HqqOptions
from .options.nearest import NearestOptions
from .options.nested import NestedOptions
from .options.signround import SignroundOptions

_nearest = later(__name__, "nearest")

METHODS: dict[str, Method] = {
    "nearest": Method(_nearest, NearestOptions, by_row=True),
    "gptq": Method(later(__name__, "gptq"), GptqOptions, needs_hessian=True),
    "nested": Method(later(__name__, "nested"), NestedOptions, needs_hessian=True),
    "hqq": Method(later(__name__, "hqq"), HqqOptions),
    "signround": Method(_nearest, SignroundOptions, block=later(__name__, "signround")),
}

__all__ = ["METHODS", "Method", "RoundingOptions"]
