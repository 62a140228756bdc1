"""Rounding: one function of tensors a method, and what it needs to know of the layer's inputs."""

from __future__ import annotations

from .gptq import GptqOptions, gptq
from .hqq import HqqOptions, hqq
from .method import Method, RoundingOptions
from .nearest import NearestOptions, nearest
from .signround import SignroundOptions

METHODS: dict[str, Method] = {
    "nearest": Method(nearest, NearestOptions, needs_hessian=False),
    "gptq": Method(gptq, GptqOptions, needs_hessian=True),
    "hqq": Method(hqq, HqqOptions, needs_hessian=False),
    "signround": Method(nearest, SignroundOptions, needs_hessian=False, by_block=True),
}

__all__ = ["METHODS", "Method", "RoundingOptions"]
