"""A loss over logits computed a few positions at a time, with their gradients, so that they are never all in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .loss_and_gradient import LossAndGradient

# Elements of one chunk of logits, and its fewest positions: every chunk reads the whole lm_head and adds to its whole gradient.
_CHUNK = 1 << 22
_FEWEST = 128

# From hidden states ``[1, positions, width]``, a weight and a bias to logits.
Head = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# From logits ``[positions, vocabulary]`` and their positions to several losses.
Losses = Callable[[Tensor, slice], list[tuple[float, LossAndGradient]]]


def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, losses: Losses, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted mean of losses over positions, and each loss's own mean.

    Args:
        hidden: the inputs of lm_head, ``[positions, width]``.
        weight: of lm_head, ``[vocabulary, width]``.
        bias: of lm_head, if it has one.
        head: computes logits from them.
        losses: returns each loss with its share, values and gradients for some positions.
        counted: the weight of each position, float32 ``[positions]``.

    Returns:
        A scalar through which gradients flow to ``hidden``, ``weight`` and ``bias``, and each loss's own mean.
    """
    return _ChunkedLoss.apply(hidden, weight, bias, head, losses, counted)  # type: ignore[no-any-return]


def rows_at_once(vocabulary: int) -> int:
    """The number of positions per chunk of logits."""
    return max(_FEWEST, _CHUNK // vocabulary)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, losses: Losses, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = any(ctx.needs_input_grad)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        given = [each for each in (weight, bias) if each is not None]
        needed = [
            False,
            *(needs for needs, each in zip(ctx.needs_input_grad[1:3], (weight, bias), strict=True) if each is not None),
        ]
        needed[0] = needs_gradient
        gradients = [
            torch.zeros(each.shape, dtype=wide, device=each.device)
            for each, needs in zip(given, needed[1:], strict=True)
            if needs
        ]
        into = torch.empty_like(hidden) if needs_gradient else None
        share = counted.to(wide) / counted.sum().clamp_min(1e-12)  # of a part of a batch, none may count
        total, parts = torch.zeros((), dtype=wide, device=hidden.device), None
        for start in range(0, len(hidden), rows_at_once(weight.shape[0])):
            rows = slice(start, start + rows_at_once(weight.shape[0]))
            leaves = [hidden[rows].detach(), *(each.detach() for each in given)]
            for leaf, needs in zip(leaves, needed, strict=True):
                leaf.requires_grad_(needs)
            with torch.set_grad_enabled(needs_gradient):
                logits = head(leaves[0].unsqueeze(0), leaves[1], leaves[2] if bias is not None else None)[0]
            found = losses(logits.detach(), rows)
            values = torch.stack([(value * share[rows]).sum() for _, (value, _) in found])
            parts = values if parts is None else parts + values
            gradient = None
            for of_all, (_, each) in found:
                gradient = each * of_all if gradient is None else gradient.add_(each, alpha=of_all)
            total += sum(of_all * value for (of_all, _), value in zip(found, values, strict=True))
            if into is not None and gradient is not None:
                gradient = gradient.mul_(share[rows].unsqueeze(-1)).to(logits.dtype)
                learned = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
                reached = torch.autograd.grad(logits, learned, gradient)
                into[rows] = reached[0]
                for whole, part in zip(gradients, reached[1:], strict=True):
                    whole += part
        ctx.gradients, ctx.types = (into, *gradients), [each.dtype for each in given]
        assert parts is not None
        ctx.mark_non_differentiable(parts)
        return total, parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _of_parts: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        into, *gradients = ctx.gradients
        into = into * gradient.to(into.dtype)
        left = iter(gradients)
        of_head = [
            next(left).mul_(gradient).to(kind) if needs else None
            for needs, kind in zip(ctx.needs_input_grad[1:3], (*ctx.types, None), strict=False)
        ]
        return into, of_head[0], of_head[1], None, None, None
