"""The losses by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ...system.lazy import later
from .loss import Loss
from .options.jsd import JsdOptions

_PACKAGE = __name__.rpartition(".")[0]
_values, _kernel = partial(later, _PACKAGE), partial(later, _PACKAGE, "fused")


def _gradient(module: str) -> Callable[..., Any]:
    return later(_PACKAGE, module, "with_gradient")


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "forward_kl": Loss(
            _values("forward_kl"),
            gradient=_gradient("forward_kl"),
            kernel=_kernel("forward_kl"),
            top=_values("top_kl"),
            top_kernel=_kernel("top_kl"),
        ),
        "reverse_kl": Loss(_values("reverse_kl"), gradient=_gradient("reverse_kl"), kernel=_kernel("reverse_kl")),
        "jsd": Loss(_values("jsd"), JsdOptions, gradient=_gradient("jsd"), kernel=_kernel("jsd")),
        "total_variation": Loss(
            _values("total_variation"), gradient=_gradient("total_variation"), kernel=_kernel("total_variation")
        ),
    }
)
