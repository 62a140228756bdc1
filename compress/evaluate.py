"""What compression cost: perplexity, divergence from the original, and how often the first choice stays the same."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .activations import ActivationStore
from .errors import SmeltError
from .progress import Progress

LOGIT_TOKENS = 512
_Z95 = 1.96


class HeadFunction(Protocol):
    """From what a model's last layer gives, ``[windows, length, width]``, to logits."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


class Reader(Protocol):
    """A model that reads text: block by block, or with the runtime."""

    def final_hidden(self, tokens: Tensor, progress: Progress, description: str) -> ActivationStore: ...

    def head(self) -> HeadFunction: ...


@dataclass(frozen=True)
class Comparison:
    """A compressed model beside its original, over the same held-out text.

    Attributes:
        text: where the text came from.
        windows, length: how much of it was read.
        perplexity_original, perplexity_compressed: exp of the mean negative log-likelihood a token.
        perplexity_ratio: compressed over original.
        perplexity_ratio_95: the ratio's 95% confidence interval, from the paired differences of windows;
            None when there are fewer than two windows.
        kl: mean KL divergence from the original's next-token distribution to the compressed one's, in nats.
        top1_agreement: share of positions where both rank the same token first.
        computed_by: what computed all this.
    """

    text: str
    windows: int
    length: int
    perplexity_original: float
    perplexity_compressed: float
    perplexity_ratio: float
    perplexity_ratio_95: tuple[float, float] | None
    kl: float
    top1_agreement: float
    computed_by: str

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def compare(
    original: Reader,
    compressed: Reader,
    tokens: Tensor,
    text: str,
    computed_by: str,
    progress: Progress,
) -> Comparison:
    """Read ``tokens`` with both models and compare what they expect next.

    Args:
        original, compressed: the models; one reads after the other.
        tokens: ids ``[windows, length]``.
        text: what to call the text.
        computed_by: what the readers are, for the report.
        progress: shows how far it is.
    """
    windows, length = tokens.shape
    sums = torch.zeros(2, windows, dtype=torch.float64)
    kl = agreed = 0.0
    with ExitStack() as stores:
        before = original.final_hidden(tokens, progress, "reading with the original")
        stores.callback(before.close)
        after = compressed.final_hidden(tokens, progress, "reading with the compressed model")
        stores.callback(after.close)
        head_before, head_after = original.head(), compressed.head()
        size = max(1, LOGIT_TOKENS // length)
        for start in range(0, windows, size):
            part = slice(start, start + size)
            nll, divergence, same = _score(head_before, head_after, before.read(part), after.read(part), tokens[part])
            sums[:, part] = nll
            kl += divergence
            agreed += same
    predicted = windows * (length - 1)
    if not torch.isfinite(sums).all():
        raise SmeltError(
            f"evaluate: the {'original' if not torch.isfinite(sums[0]).all() else 'compressed'} model gives NaN on {text}"
        )
    mean = sums.sum(dim=1) / predicted
    return Comparison(
        text=text,
        windows=windows,
        length=length,
        perplexity_original=math.exp(mean[0]),
        perplexity_compressed=math.exp(mean[1]),
        perplexity_ratio=math.exp(mean[1] - mean[0]),
        perplexity_ratio_95=_interval((sums[1] - sums[0]) / (length - 1)),
        kl=kl / predicted,
        top1_agreement=agreed / predicted,
        computed_by=computed_by,
    )


def _score(
    head_before: HeadFunction, head_after: HeadFunction, before: Tensor, after: Tensor, tokens: Tensor
) -> tuple[Tensor, float, float]:
    target = tokens[:, 1:, None]
    log_p = head_before(before)[:, :-1].float().log_softmax(-1)
    log_q = head_after(after)[:, :-1].float().log_softmax(-1)
    nll = torch.stack([-log.gather(-1, target).squeeze(-1).sum(dim=1, dtype=torch.float64) for log in (log_p, log_q)])
    same = (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
    # One position after another: a whole copy of the logits in float64 would be the largest thing in memory.
    divergence = sum(
        (p.exp() * (p - q)).sum(dtype=torch.float64).item()
        for p, q in zip(log_p.flatten(0, 1), log_q.flatten(0, 1), strict=True)
    )
    return nll, divergence, same


def _interval(differences: Tensor) -> tuple[float, float] | None:
    """95% interval of exp(mean) by the normal approximation over windows."""
    if len(differences) < 2:
        return None
    mean = differences.mean().item()
    half = _Z95 * differences.std().item() / math.sqrt(len(differences))
    return math.exp(mean - half), math.exp(mean + half)
