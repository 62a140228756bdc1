"""The KV cache dtypes, one row each, used by the engine, its messages, the command line, caches and kernels.

A new dtype needs a row here and support in the kernels that read and write it. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

OperatorsName = Literal["torch", "native", "gpu"]
_EVERYWHERE: tuple[OperatorsName, ...] = ("torch", "native", "gpu")


@dataclass(frozen=True)
class CacheType:
    """A number format of the cache.

    Attributes:
        name: its name in ``kv_dtype``.
        dtype: torch's name of the dtype, unique to this row; None for the compute dtype.
        kind: its name in the Triton kernels.
        limit: the value that a row's largest magnitude is scaled to; None for no scale. All others have a float32
            scale for each head and position.
        storage: torch's name of the dtype that holds the codes in GPU memory, if not ``dtype``.
        codes_per_byte: codes per byte there.
        rotated: whether keys are rotated before they are rounded, and queries with them, which spreads outliers.
        operators: the operators that support it.
        native: its number in the compiled CPU kernels (``kernels.h``); None if they do not support it.
        holds: compressed-tensors' name of the codes that a checkpoint's ``kv_cache_scheme`` stores in it.
        selectable: whether ``kv_dtype`` accepts it; if not, some GPUs use it to store another.
    """

    name: str
    dtype: str | None
    kind: str
    limit: float | None = None
    storage: str | None = None
    codes_per_byte: int = 1
    rotated: bool = False
    operators: tuple[OperatorsName, ...] = _EVERYWHERE
    native: int | None = None
    holds: Literal["int", "float"] | None = None
    selectable: bool = True

    def torch_dtype(self, computing: torch.dtype) -> torch.dtype:
        """The torch dtype, given the compute dtype ``computing``."""
        return computing if self.dtype is None else _named(self.dtype)

    def stored_dtype(self, computing: torch.dtype) -> torch.dtype:
        """The torch dtype that holds the codes in GPU memory."""
        return self.torch_dtype(computing) if self.storage is None else _named(self.storage)


CACHE_TYPES = (
    CacheType("auto", None, "plain", native=0),
    CacheType("int8", "int8", "int8", 127.0, native=1, holds="int"),
    CacheType("fp8", "float8_e4m3fn", "float8", 448.0, native=2, holds="float"),
    # 4-bit codes range from -8 to 7, so 7.5 uses both ends.
    CacheType("int4", "int4", "int4", 7.5, "uint8", codes_per_byte=2, rotated=True, operators=("gpu",)),
    CacheType("fp8", "float8_e4m3fnuz", "float8 fnuz", 240.0, operators=("gpu",), selectable=False),
)
BY_NAME = {each.name: each for each in CACHE_TYPES if each.selectable}
BY_KIND = {each.kind: each for each in CACHE_TYPES}
_BY_DTYPE = {each.dtype: each for each in CACHE_TYPES}


def cache_type_of(dtype: torch.dtype) -> CacheType:
    """The cache dtype of a torch dtype; the unquantized one for all others."""
    return _BY_DTYPE.get(str(dtype).removeprefix("torch."), _BY_DTYPE[None])


def type_that_holds(codes: str) -> CacheType:
    """The cache dtype that stores a checkpoint's ``int`` or ``float`` codes as it rounds them."""
    return next(each for each in CACHE_TYPES if each.holds == codes)


def names_for(operators: OperatorsName) -> list[str]:
    """The cache dtypes that some operators support, by name."""
    return [each.name for each in BY_NAME.values() if operators in each.operators]


def kv_dtype_help() -> str:
    """The help of the option ``--kv-dtype``."""
    everywhere = [name for name in names_for("gpu") if set(BY_NAME[name].operators) == set(_EVERYWHERE)]
    only_gpu = [name for name in names_for("gpu") if name not in everywhere]
    return f"How keys and values are kept: {', '.join(everywhere)}; on a GPU also {', '.join(only_gpu)}."


def _named(dtype: str) -> torch.dtype:
    import torch

    return getattr(torch, dtype)
