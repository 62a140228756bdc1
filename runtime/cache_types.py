"""The KV cache dtypes of :mod:`smelt.quant.cache_types`, found by what the engine and its kernels know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..quant.cache_types import BY_NAME, CACHE_TYPES, EVERYWHERE, CacheType, OperatorsName

if TYPE_CHECKING:
    import torch

BY_KIND = {each.kind: each for each in CACHE_TYPES}
QUANTIZED_KINDS = tuple(each.kind for each in CACHE_TYPES if each.limit is not None)
SELECTABLE_KINDS = tuple(each.kind for each in BY_NAME.values())
_BY_DTYPE = {each.dtype: each for each in CACHE_TYPES}


def cache_type_of(dtype: torch.dtype) -> CacheType:
    """The cache dtype of a torch dtype; the unquantized one for all others."""
    return _BY_DTYPE.get(str(dtype).removeprefix("torch."), _BY_DTYPE[None])


def type_that_holds(codes: str) -> CacheType:
    """The cache dtype that stores a checkpoint's ``int`` or ``float`` codes as it rounds them."""
    return next(each for each in CACHE_TYPES if each.holds and each.type == codes)


def names_for(operators: OperatorsName) -> list[str]:
    """The cache dtypes that some operators support, by name."""
    return [each.name for each in BY_NAME.values() if operators in each.operators]


def kv_cache_dtype_help() -> str:
    """The help of the option ``--kv-cache-dtype``."""
    everywhere = [name for name in names_for("gpu") if set(BY_NAME[name].operators) == set(EVERYWHERE)]
    only_gpu = [name for name in names_for("gpu") if name not in everywhere]
    return f"How keys and values are kept: {', '.join(everywhere)}; on a GPU also {', '.join(only_gpu)}."
