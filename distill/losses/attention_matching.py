"""Attention matching: the divergence of a student's attention probabilities from its teacher's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

# The score of masked positions: not infinite, since a difference of infinities is NaN.
_UNSEEN = -1e30
# Additive masks are below this.
_FORBIDDEN = -1e4


class _Seen(NamedTuple):
    """Inputs of a block's attention, after RoPE; causal attention has no mask."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float


class NotSeenError(ValueError):
    """A block computes attention in a way that cannot be observed, or not at all."""


class AttentionMatching(nn.Module):
    """KL divergence of blocks' attention from the teacher's, head by head (after MiniLM, arXiv:2002.10957, in all blocks).

    Attention is observed in the call itself, so any transformers model that uses torch's
    ``scaled_dot_product_attention`` is supported.

    Args:
        student: its blocks.
        teacher: its blocks.
        pairs: which of the student's is compared with which of the teacher's.
        heads: of each pair, the number of heads of the student's and of the teacher's.

    Attributes:
        mixtures: if student and teacher differ in heads: the weight of each student head in the mixture compared with
            each teacher head. They are trained with the student, then discarded.
    """

    def __init__(
        self,
        student: Sequence[nn.Module],
        teacher: Sequence[nn.Module],
        pairs: Sequence[tuple[int, int]],
        heads: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__()
        self._blocks = {"student": [student[i] for i, _ in pairs], "teacher": [teacher[j] for _, j in pairs]}
        self._seen: dict[str, list[_Seen]] = {}
        self._mixed = [number for number, (ours, theirs) in enumerate(heads) if ours != theirs]
        self.mixtures = nn.ParameterList([nn.Parameter(torch.zeros(heads[n][1], heads[n][0])) for n in self._mixed])

    @contextmanager
    def watching(self, who: str) -> Iterator[None]:
        """Within it, record the attention inputs of ``student`` or ``teacher``."""
        watch = _Watch()
        with ExitStack() as hooks:
            for block in dict.fromkeys(self._blocks[who]):
                hooks.callback(block.register_forward_pre_hook(watch.enter).remove)
                hooks.callback(block.register_forward_hook(watch.leave).remove)
            with watch:
                yield
        missing = [block for block in self._blocks[who] if block not in watch.seen]
        if missing:
            raise NotSeenError(f"{type(missing[0]).__name__} does not use torch's scaled_dot_product_attention")
        self._seen[who] = [watch.seen[block] for block in self._blocks[who]]

    def forward(self, counted: Tensor | None) -> Tensor:
        """The mean over pairs, heads and positions; ``counted [windows, length]`` weighs positions."""
        ours, theirs = self._seen.pop("student"), self._seen.pop("teacher")
        total = torch.zeros((), device=ours[0].query.device)
        for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
            weight = (
                torch.ones(len(mine.query), mine.query.shape[2], device=total.device) if counted is None else counted
            )
            mixture = self.mixtures[self._mixed.index(number)] if number in self._mixed else None
            total = total + _ByWindow.apply(mine.query, mine.key, mixture, mine, wanted, weight)
        return total / len(ours)


class _Watch(TorchFunctionMode):
    """Records the attention inputs of the blocks being run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[nn.Module, _Seen] = {}
        self._inside: list[nn.Module] = []

    def enter(self, block: nn.Module, _args: object) -> None:
        self._inside.append(block)

    def leave(self, _block: nn.Module, _args: object, _output: object) -> None:
        self._inside.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self._inside:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            scale = given.get("scale")
            width = given["query"].shape[-1]
            self.seen[self._inside[-1]] = _Seen(
                given["query"], given["key"], given.get("attn_mask"), width**-0.5 if scale is None else scale
            )
        return func(*args, **kwargs)


class _ByWindow(torch.autograd.Function):
    """The loss of a pair with its gradients, a window at a time: probabilities of all windows would be large."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, mixture: Tensor | None, mine: _Seen, wanted: _Seen, counted: Tensor
    ) -> Tensor:
        given = [each for each in (query, key, mixture) if each is not None]
        needs_gradient = any(ctx.needs_input_grad)
        gradients = [torch.zeros_like(each) for each in given] if needs_gradient else []
        total = torch.zeros((), dtype=_wide(query), device=query.device)
        share = counted.to(total.dtype) / counted.sum().clamp_min(1e-12)
        for window in range(len(query)):
            leaves = [(each[window] if each is not mixture else each).detach() for each in given]
            with torch.no_grad():
                theirs = _scores(wanted.query[window], wanted.key[window], wanted, window)
            with torch.set_grad_enabled(needs_gradient):
                for leaf in leaves:
                    leaf.requires_grad_(needs_gradient)
                ours = _scores(leaves[0], leaves[1], mine, window)
                # Over positions visible to both: one may have a sliding window, and the other none.
                both = (ours[0] > _UNSEEN / 2) & (theirs[0] > _UNSEEN / 2)
                ours, theirs = (torch.log_softmax(each.masked_fill(~both, _UNSEEN), -1) for each in (ours, theirs))
                if mixture is not None:
                    parts = torch.log_softmax(leaves[2].to(ours.dtype), -1)
                    ours = torch.logsumexp(ours.unsqueeze(0) + parts[:, :, None, None], 1)
                divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean(0)
                value = (divergence * share[window]).sum()
            total += value.detach()
            if needs_gradient:
                found = torch.autograd.grad(value, leaves)
                for whole, part, each in zip(gradients, found, given, strict=True):
                    (whole if each is mixture else whole[window]).add_(part)
        ctx.gradients, ctx.mixed = gradients, mixture is not None
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = [each * gradient.to(each.dtype) for each in ctx.gradients]
        return found[0], found[1], found[2] if ctx.mixed else None, None, None, None


def _scores(query: Tensor, key: Tensor, seen: _Seen, window: int) -> Tensor:
    """Scores of one window, ``[heads, length, length]``."""
    heads, length = query.shape[0], query.shape[1]
    if key.shape[0] != heads:
        key = key.repeat_interleave(heads // key.shape[0], dim=0)
    scores = (query.to(_wide(query)) @ key.to(_wide(key)).mT) * seen.scale
    if seen.mask is None:
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, _UNSEEN)
    else:
        mask = seen.mask[window if len(seen.mask) > 1 else 0]
        hidden = ~mask if mask.dtype == torch.bool else mask < _FORBIDDEN
        scores = (scores if mask.dtype == torch.bool else scores + mask).masked_fill(hidden, _UNSEEN)
    return scores


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
