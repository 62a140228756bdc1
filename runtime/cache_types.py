"""What keys and values may be kept in: one row a type. The engine, its messages, the command line, caches and kernels read it.

A new type is a row here, and the code of the kernels that read and write it. Nothing here imports torch.
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
        name: as ``kv_dtype`` calls it.
        dtype: torch's name of the numbers, which no other row has; None for whatever is computed in.
        kind: what the Triton kernels call it.
        limit: what a row's largest number becomes; None if numbers are kept without a scale. All others have a float32
            scale for each head and position.
        storage: torch's name of what holds the codes in a GPU's memory, if that is not ``dtype`` itself.
        codes_per_byte: how many codes share a byte there.
        rotated: whether keys are rotated before they are rounded, and queries with them, which spreads outliers.
        operators: which operators keep it.
        native: its number in the compiled CPU kernels (``kernels.h``); None if they do not know it.
        holds: the type, in compressed-tensors' words, of the codes that a checkpoint's ``kv_cache_scheme`` keeps in it.
        selectable: whether ``kv_dtype`` may ask for it; if not, it is how some GPUs keep another.
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
        """The numbers as torch knows them, where ``computing`` is computed in."""
        return computing if self.dtype is None else _named(self.dtype)

    def stored_dtype(self, computing: torch.dtype) -> torch.dtype:
        """What holds the codes in a GPU's memory."""
        return self.torch_dtype(computing) if self.storage is None else _named(self.storage)


CACHE_TYPES = (
    CacheType("auto", None, "plain", native=0),
    CacheType("int8", "int8", "int8", 127.0, native=1, holds="int"),
    CacheType("fp8", "float8_e4m3fn", "float8", 448.0, native=2, holds="float"),
    # Codes of 4 bits reach from -8 to 7, so that 7.5 wastes neither end.
    CacheType("int4", "int4", "int4", 7.5, "uint8", codes_per_byte=2, rotated=True, operators=("gpu",)),
    CacheType("fp8", "float8_e4m3fnuz", "float8 fnuz", 240.0, operators=("gpu",), selectable=False),
)
BY_NAME = {each.name: each for each in CACHE_TYPES if each.selectable}
BY_KIND = {each.kind: each for each in CACHE_TYPES}
_BY_DTYPE = {each.dtype: each for each in CACHE_TYPES}


def cache_type_of(dtype: torch.dtype) -> CacheType:
    """The type whose numbers these are; that of plain numbers for all others."""
    return _BY_DTYPE.get(str(dtype).removeprefix("torch."), _BY_DTYPE[None])


def type_that_holds(codes: str) -> CacheType:
    """The type that keeps a checkpoint's codes, ``int`` or ``float``, as it rounds them."""
    return next(each for each in CACHE_TYPES if each.holds == codes)


def names_for(operators: OperatorsName) -> list[str]:
    """The types that some operators keep, by their names."""
    return [each.name for each in BY_NAME.values() if operators in each.operators]


def kv_dtype_help() -> str:
    """The option ``--kv-dtype`` in a sentence."""
    everywhere = [name for name in names_for("gpu") if set(BY_NAME[name].operators) == set(_EVERYWHERE)]
    only_gpu = [name for name in names_for("gpu") if name not in everywhere]
    return f"How keys and values are kept: {', '.join(everywhere)}; on a GPU also {', '.join(only_gpu)}."


def _named(dtype: str) -> torch.dtype:
    import torch

    return getattr(torch, dtype)
