"""Causal attention for training on a CPU, in strips of queries whose scores fit in the processor's cache.

torch's flash attention on CPUs is made for long windows: its backward pass takes three times as long as its forward
pass, and at calibration lengths attention takes more time than all linears together. Here a strip of queries is
multiplied with all keys up to its end in one batched product; the backward pass recomputes the strip's probabilities,
so nothing as large as the scores is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# Queries of a strip: a quarter of the window within these limits.
_LEAST_STRIP, _MOST_STRIP = 64, 256
# The scores of one strip, of as many windows as that allows; at least of one.
_SCORE_BYTES = 4 << 20
# Longer windows were not measured.
_LONGEST = 2048


class StripedAttention(TorchFunctionMode):
    """Context manager that computes causal attention on a CPU with :func:`causal_attention` where that is faster.

    It applies to all code that calls ``scaled_dot_product_attention``, such as transformers models. Calls with a mask, with
    dropout, or of sizes where it was not found faster go to torch.
    """

    @staticmethod
    def entered() -> bool:
        """Whether it is already active in this context."""
        return any(isinstance(mode, StripedAttention) for mode in _get_current_function_mode_stack())

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace attention, and pass every other function on."""
        kwargs = kwargs or {}
        return (_attention if func is scaled_dot_product_attention else func)(*args, **kwargs)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attention in which a token attends to itself and those before it.

    Scores and probabilities have the type of the inputs, as in transformers' eager attention; each softmax and each sum is
    computed in float32.

    Args:
        query: ``[windows, heads, length, width]``.
        key, value: the same, or with a number of heads that divides it.
        scale: of the scores; by default ``width ** -0.5``.
    """
    heads = query.shape[1]
    if key.shape[1] != heads:
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    result: Tensor = _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal and attn_mask is None and not dropout_p and _is_faster(query, key, value):
        return causal_attention(query, key, value, scale)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[2] == key.shape[2] <= _LONGEST
        and _multiplies_bfloat16()
    )


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; the others were not measured."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for part in _parts(query):
            queries, keys, values, outputs = map(_flat, (query[part] * scale, key[part], value[part], output[part]))
            for strip, seen in _strips(query.shape[2]):
                outputs[:, strip] = _probabilities(queries[:, strip], keys[:, seen]) @ values[:, seen]
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        gradients = [torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value)]
        for part in _parts(query):
            queries, keys, values, after = map(_flat, (query[part] * ctx.scale, key[part], value[part], gradient[part]))
            of_queries = _flat(gradients[0][part])
            of_keys, of_values = torch.zeros(keys.shape), torch.zeros(values.shape)
            for strip, seen in _strips(query.shape[2]):
                probabilities = _probabilities(queries[:, strip], keys[:, seen])
                of_values[:, seen] += probabilities.mT @ after[:, strip]
                of_scores = after[:, strip] @ values[:, seen].mT
                of_scores = torch.ops.aten._softmax_backward_data(of_scores, probabilities, -1, probabilities.dtype)
                of_queries[:, strip] = of_scores @ keys[:, seen]
                of_keys[:, seen] += of_scores.mT @ queries[:, strip]
            for whole, found in ((gradients[1], of_keys), (gradients[2], of_values)):
                _flat(whole[part]).copy_(found)
        return gradients[0].mul_(ctx.scale), gradients[1], gradients[2], None


def _probabilities(queries: Tensor, keys: Tensor) -> Tensor:
    """Attention probabilities of the last tokens of a window."""
    scores = queries @ keys.mT
    scores[:, :, -queries.shape[1] :] += _mask(queries.shape[1], scores.dtype)
    return torch.softmax(scores, -1)


@functools.cache
def _mask(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)


def _flat(heads: Tensor) -> Tensor:
    return heads.flatten(0, 1)


def _parts(query: Tensor) -> Iterator[slice]:
    """Windows that are processed together."""
    windows, heads, length, _ = query.shape
    together = max(1, _SCORE_BYTES // (heads * length * min(length, _height(length)) * query.element_size()))
    return (slice(start, start + together) for start in range(0, windows, together))


def _strips(length: int) -> Iterator[tuple[slice, slice]]:
    """Strips of queries, and the keys that each attends to."""
    height = _height(length)
    ends = ((start, min(start + height, length)) for start in range(0, length, height))
    return ((slice(start, end), slice(end)) for start, end in ends)


def _height(length: int) -> int:
    return min(max(_LEAST_STRIP, length // 4), _MOST_STRIP)
