"""Quantized KV cache: calibration of its scales, and computing with rounded keys and values.

Blocks get a stand-in for transformers' cache, to which every attention passes its keys (after RoPE) and values,
and which returns those to attend to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ...models.structure.block_calls import BlockCall
from ...system.processes.process_group import Processes
from ..activations import ActivationRounding, straight_through
from ..row_rounding import cache_rounding

_ENDS = ("low", "high")
_CACHES = ("past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class KVRounding:
    """How a block's keys and values are rounded."""

    keys: ActivationRounding
    values: ActivationRounding

    @classmethod
    def stored_as(cls, args: QuantizationArgs, tensors: dict[str, Tensor]) -> KVRounding:
        """The rounding that ``k_scale`` and ``v_scale`` describe."""
        return cls(ActivationRounding.stored_as(args, tensors, "k"), ActivationRounding.stored_as(args, tensors, "v"))

    def stored(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint stores with the attention's weights."""
        return self.keys.stored("k") | self.values.stored("v")


class RangesCache:
    """Records the extremes of keys and values per head, and changes nothing."""

    def __init__(self) -> None:
        self._ranges: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention with ``[windows, heads, length, width]``."""
        for i, tensor in enumerate((keys, values)):
            low, high = (_by_head(tensor, extreme) for extreme in (torch.amin, torch.amax))
            if len(self._ranges) <= i:
                self._ranges.append((low, high))
            else:
                self._ranges[i] = (torch.minimum(self._ranges[i][0], low), torch.maximum(self._ranges[i][1], high))
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def rounding(self, args: QuantizationArgs, stored: torch.dtype, processes: Processes) -> KVRounding:
        """The rounding for the observed ranges, over all processes."""
        found = []
        mine = {f"{i} {name}": e for i, pair in enumerate(self._ranges) for name, e in zip(_ENDS, pair, strict=True)}
        seen = [each for each in processes.all_gather(mine) if each]  # a process may have no windows
        for i in range(2):
            low = torch.stack([each[f"{i} low"] for each in seen]).amin(0)
            high = torch.stack([each[f"{i} high"] for each in seen]).amax(0)
            if args.strategy != "attn_head":
                low, high = low.amin(), high.amax()
            found.append(ActivationRounding.observed(args, low, high, stored))
        return KVRounding(*found)


class RoundedCache:
    """Rounds keys and values as they enter the cache; attention of the same step uses the rounded ones."""

    def __init__(self, rounding: KVRounding) -> None:
        self._keys, self._values = cache_rounding(rounding.keys), cache_rounding(rounding.values)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return straight_through(keys, self._keys), straight_through(values, self._values)

    def get_seq_length(self, *_: Any) -> int:
        return 0


def with_cache(call: BlockCall, cache: RangesCache | RoundedCache) -> BlockCall:
    """The same call of a block with a stand-in for its cache."""
    return BlockCall(call.args, {**call.kwargs, **dict.fromkeys(caches_of(call.kwargs), cache)})


def caches_of(kwargs: dict[str, Any]) -> list[str]:
    """The argument names under which a block is called with a cache."""
    return [name for name in _CACHES if name in kwargs]


def takes_cache(call: BlockCall) -> bool:
    """Whether a block is called with a cache."""
    return bool(caches_of(call.kwargs))


def _by_head(tensor: Tensor, extreme: Any) -> Tensor:
    return extreme(tensor.float(), dim=(0, 2, 3)).view(-1, 1, 1)
