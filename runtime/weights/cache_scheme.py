"""The KV cache quantization of a checkpoint: compressed-tensors' ``kv_cache_scheme``, and the scales of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import ValidationError
from torch import Tensor

from ...quant.activations import ActivationRounding
from ...quant.row_rounding import RowRounding, cache_rounding
from ...system.errors import RuntimeProblem
from ..cache_types import type_that_holds
from .rounding import FixedRounding, is_fixed
from .stored import Tensors, rounding_of


@dataclass(frozen=True)
class CacheScheme:
    """How all layers' keys and values are rounded.

    Attributes:
        args: the number format and granularity of scales.
        layers: keys and values of each layer.
        head_size: elements of a head.
    """

    args: QuantizationArgs
    layers: Sequence[tuple[ActivationRounding, ActivationRounding]]
    head_size: int

    @property
    def kept(self) -> torch.dtype | None:
        """The cache dtype of the codes, if every head and position has one scale and no zero-point; None if they cannot be stored so."""
        if not self.args.symmetric or (self.args.dynamic is True and self.args.group_size != self.head_size):
            return None
        return type_that_holds(self.args.type).torch_dtype(torch.float32)

    @property
    def kv_cache_dtype(self) -> str:
        """Their name in an engine's ``kv_cache_dtype``."""
        return type_that_holds("float").name if self.args.type == "float" else f"int{self.args.num_bits}"

    def of_heads(self, heads: Sequence[range]) -> CacheScheme:
        """The same for some of each layer's heads."""
        if self.args.strategy != "attn_head":
            return self
        layers = [
            (_of_heads(keys, some), _of_heads(values, some))
            for (keys, values), some in zip(self.layers, heads, strict=True)
        ]
        return replace(self, layers=layers)

    def sentence(self, kept: torch.dtype) -> str:
        """A description of the rounding and the cache dtype."""
        scale = "a scale for each position and head"
        if self.args.dynamic is True and self.args.group_size != self.head_size:
            scale = f"a scale for each {self.args.group_size} elements of a position and head"
        if self.args.dynamic is False:
            scale = "a fixed scale" + (" for each head" if self.args.strategy == "attn_head" else "")
        zero = "" if self.args.symmetric else " and zero-point"
        name = str(kept).removeprefix("torch.")
        return f"keys and values are rounded to {self.kv_cache_dtype} with {scale}{zero}, as the checkpoint says, and kept in {name}"

    def rules(
        self, dtype: torch.dtype, kept: torch.dtype, device: torch.device | None = None
    ) -> list[tuple[CacheRule, CacheRule]]:
        """The rules that round keys and values of each layer.

        Args:
            dtype: their compute dtype.
            kept: the cache dtype: :attr:`kept`, or ``dtype``.
            device: where.
        """
        return [
            (CacheRule(keys, dtype, kept, device), CacheRule(values, dtype, kept, device))
            for keys, values in self.layers
        ]


def _of_heads(rounding: ActivationRounding, heads: range) -> ActivationRounding:
    scale, zero = (None if part is None else part[heads.start : heads.stop] for part in (rounding.scale, rounding.zero))
    return replace(rounding, scale=scale, zero=zero)


class CacheRule:
    """Rounds keys, or values, of one layer ``[tokens, heads, size]``.

    Args:
        rounding: the rounding.
        dtype: their compute dtype.
        kept: the cache dtype; ``dtype`` for dequantized values.
        device: where.

    Attributes:
        rounding: the rounding.
        waits: whether compressed-tensors' code rounds, which synchronizes with a GPU.
    """

    def __init__(
        self, rounding: ActivationRounding, dtype: torch.dtype, kept: torch.dtype, device: torch.device | None
    ) -> None:
        self.rounding = rounding
        self._kept = None if kept == dtype else kept
        self._round: Callable[[Tensor], Tensor] = cache_rounding(rounding)
        if is_fixed(rounding):
            # Scales are per head, the second-to-last dimension here.
            scale, zero = (None if part is None else part.reshape(-1, 1) for part in (rounding.scale, rounding.zero))
            self._round = FixedRounding(replace(rounding, scale=scale, zero=zero), dtype, device)
        self.waits = self._round is rounding

    def by_head(self, heads: int) -> Tensor | None:
        """float32 scales of each head, in the compute dtype's precision; None if they are dynamic."""
        if not isinstance(self._round, FixedRounding):
            return None
        return self._round.scale.float().flatten().expand(heads).contiguous()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as stored, and float32 scales ``[tokens, heads]``; the dequantized values, twice, where no codes are stored."""
        if self._kept is None or not isinstance(self._round, FixedRounding | RowRounding):
            found = self._round(x)
            return found, found
        codes, scale = self._round.parts(x)
        return codes.to(self._kept), scale.float().squeeze(-1).expand(x.shape[:-1])


def cache_args(config: dict[str, Any] | None) -> QuantizationArgs | None:
    """The KV cache arguments of a ``quantization_config``; None if it has none.

    Raises:
        RuntimeProblem: the runtime does not support them.
    """
    scheme = (config or {}).get("kv_cache_scheme")
    if not scheme:
        return None
    try:
        args = QuantizationArgs.model_validate(scheme)
    except ValidationError as error:
        raise RuntimeProblem(
            f"kv_cache_scheme is not valid for compressed-tensors ({error.errors()[0]['msg']})"
        ) from None
    known = args.num_bits == 8 if args.type == "float" else 2 <= args.num_bits <= 8
    fixed = args.dynamic is False and args.strategy in ("tensor", "attn_head")
    by_group = args.dynamic is True and args.strategy == "group"
    if not known or not (fixed or by_group):
        how = "dynamic" if args.dynamic else "fixed"
        raise RuntimeProblem(
            f"kv_cache_scheme: keys and values in {args.type}{args.num_bits} with {how} scales by {args.strategy} are not"
            " supported; integers and 8-bit floats are, with fixed scales by tensor or attn_head, or dynamic ones by group"
        )
    return args


def cache_scheme(
    args: QuantizationArgs | None, tensors: Tensors, attentions: Sequence[str], heads: Sequence[int], head_size: int
) -> CacheScheme | None:
    """The scheme with its scales.

    Args:
        args: the checkpoint's KV cache arguments, if any.
        tensors: of the checkpoint.
        attentions: the name of each layer's attention.
        heads: the number of key-value heads of each.
        head_size: elements of a head.

    Raises:
        RuntimeProblem: a layer's scales are missing, or too few.
    """
    if args is None:
        return None
    if args.dynamic is True and head_size % (args.group_size or 1):
        raise RuntimeProblem(
            f"kv_cache_scheme: groups of {args.group_size} do not divide heads of {head_size} elements"
        )
    layers = []
    for name, count in zip(attentions, heads, strict=True):
        keys, values = (rounding_of(args, tensors, name, what) for what in ("k", "v"))
        for what, rounding in (("k", keys), ("v", values)):
            wanted = count if args.strategy == "attn_head" else 1
            if rounding.scale is not None and rounding.scale.numel() != wanted:
                raise RuntimeProblem(f"{name}: its {what}_scale has {rounding.scale.numel()} elements, not {wanted}")
        layers.append((keys, values))
    return CacheScheme(args, layers, head_size)
