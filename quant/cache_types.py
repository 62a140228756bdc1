"""The number formats of the KV cache, one row each, used by recipes, checkpoints, the engine, caches and kernels.

A new one needs a row here and support in the kernels that read and write it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

OperatorsName = Literal["torch", "native", "gpu"]
EVERYWHERE: tuple[OperatorsName, ...] = ("torch", "native", "gpu")


@dataclass(frozen=True)
class CacheType:
    """A number format of the cache.

    Attributes:
        name: its name in ``kv_cache_dtype``, and in recipes if it is quantized.
        dtype: torch's name of the dtype, unique to this row; None for the compute dtype.
        kind: its name in the Triton kernels.
        limit: the value that a row's largest magnitude is scaled to; None for no scale. All others have a float32
            scale for each head and position.
        type: compressed-tensors' name of the type of its codes.
        bits: of a code.
        scales: the granularity of a recipe's scales, unless it says otherwise.
        storage: torch's name of the dtype that holds the codes in GPU memory, if not ``dtype``.
        codes_per_byte: codes per byte there.
        rotated: whether keys are rotated before they are rounded, and queries with them, which spreads outliers.
        operators: the operators that support it.
        native: its number in the compiled CPU kernels (``kernels.h``); None if they do not support it.
        holds: whether it stores a checkpoint's codes of its type, of any bits.
        selectable: whether recipes and ``kv_cache_dtype`` accept it; if not, some GPUs use it to store another.
    """

    name: str
    dtype: str | None
    kind: str
    limit: float | None = None
    type: Literal["int", "float"] = "float"
    bits: int = 8
    scales: Literal["tensor", "token"] = "tensor"
    storage: str | None = None
    codes_per_byte: int = 1
    rotated: bool = False
    operators: tuple[OperatorsName, ...] = EVERYWHERE
    native: int | None = None
    holds: bool = False
    selectable: bool = True

    @property
    def packed(self) -> bool:
        """Whether a byte in GPU memory holds several codes."""
        return self.codes_per_byte > 1

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the largest code of integers."""
        assert self.limit is not None
        return -math.ceil(self.limit), math.floor(self.limit)

    def torch_dtype(self, computing: torch.dtype) -> torch.dtype:
        """The torch dtype, given the compute dtype ``computing``."""
        return computing if self.dtype is None else _named(self.dtype)

    def stored_dtype(self, computing: torch.dtype) -> torch.dtype:
        """The torch dtype that holds the codes in GPU memory."""
        return self.torch_dtype(computing) if self.storage is None else _named(self.storage)


CACHE_TYPES = (
    CacheType("auto", None, "plain", native=0),
    CacheType("int8", "int8", "int8", 127.0, "int", native=1, holds=True),
    CacheType("fp8", "float8_e4m3fn", "float8", 448.0, native=2, holds=True),
    # 4-bit codes range from -8 to 7, so 7.5 uses both ends.
    CacheType(
        "int4", "int4", "int4", 7.5, "int", 4, "token", "uint8", codes_per_byte=2, rotated=True, operators=("gpu",)
    ),
    CacheType("fp8", "float8_e4m3fnuz", "float8 fnuz", 240.0, operators=("gpu",), selectable=False),
)
BY_NAME = {each.name: each for each in CACHE_TYPES if each.selectable}
_QUANTIZED = [each for each in BY_NAME.values() if each.limit is not None]
# What recipes choose from, the most accurate first.
CHOICES = tuple(each.name for each in sorted(_QUANTIZED, key=lambda each: (-each.bits, each.name)))


def _named(dtype: str) -> torch.dtype:
    import torch

    return getattr(torch, dtype)
