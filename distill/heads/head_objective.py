"""What a draft head learns: the model's own probabilities, several tokens ahead, from the states between its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...models.causal_attention import StripedAttention
from ..losses.chunked import rows_at_once
from ..run.student import WholeModel
from ..training.batches import TrainingBatch
from .head_module import HeadModule

# Each place further in a draft counts less: it is of use only if those before it are right.
_LATER = 0.8


class StatesBetweenLayers:
    """What a model's layers leave of a text, and its logits.

    Args:
        model: the model, which is not trained.
        after: after how many of its layers.
    """

    def __init__(self, model: WholeModel, after: Sequence[int]) -> None:
        self._model, self._after = model, after
        self._kept: dict[int, Tensor] = {}
        blocks = list(model.blocks)
        if 0 in after:
            blocks[0].register_forward_pre_hook(self._before, with_kwargs=True)
        for count in {count for count in after if count}:
            blocks[count - 1].register_forward_hook(lambda _, __, found, count=count: self._after_layer(count, found))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[windows, length, states x hidden]`` in float32, and logits ``[windows, length, vocabulary]``."""
        split = self._model.split
        with StripedAttention():
            hidden = split.hidden(tokens)
            logits = split.logits(hidden, split.head.weight, split.head.bias)
        return torch.cat([self._kept[count] for count in self._after], -1).float(), logits.float()

    def _before(self, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._kept[0] = given[0] if given else named["hidden_states"]

    def _after_layer(self, count: int, found: Any) -> None:
        self._kept[count] = found[0] if isinstance(found, tuple) else found


class HeadLearner:
    """A draft head and its objective: cross-entropy with the model's probabilities at each place of a draft.

    Args:
        head: the draft head.
        read: the model that it drafts for.
        table: the model's embeddings.
        tokens: which of the model's tokens each of its logits is for; None for all, in their order.
        ahead: how many tokens of a draft it learns.
        kept: held-out batches.
    """

    def __init__(
        self,
        head: HeadModule,
        read: StatesBetweenLayers,
        table: Tensor,
        tokens: Tensor | None,
        ahead: int,
        kept: Sequence[TrainingBatch],
    ) -> None:
        self._head, self._read, self._table = head, read, table
        self._tokens, self._ahead, self._kept = tokens, ahead, kept

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss on a batch, and that of each place."""
        losses = [loss for loss, _ in self._places(batch)]
        weights = [_LATER**i for i in range(len(losses))]
        total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return total, {f"place {i + 1}": float(loss.detach()) for i, loss in enumerate(losses)}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Losses on held-out text, and the share of draft tokens that exact verification would accept."""
        sums: dict[str, float] = {}
        windows = sum(len(batch.tokens) for batch in self._kept)
        for batch in self._kept:
            for i, (loss, overlap) in enumerate(self._places(batch)):
                for name, value in ((f"place {i + 1}", loss), (f"accepted {i + 1}", overlap)):
                    sums[name] = sums.get(name, 0.0) + float(value) * len(batch.tokens) / windows
        return sums

    def _places(self, batch: TrainingBatch) -> list[tuple[Tensor, Tensor]]:
        """Of each place of a draft: its loss, and how much of both models' probabilities is the same."""
        states, logits = self._read(batch.tokens)
        wanted = logits.softmax(-1)
        if self._tokens is not None:
            wanted = wanted[..., self._tokens]
        embedded = self._table[batch.tokens].float()
        found = []
        for place, normed in enumerate(self._head.unrolled(embedded, states, self._ahead)):
            count = normed.shape[1]
            found.append(self._compared(normed.flatten(0, 1), wanted[:, 1 + place : 1 + place + count].flatten(0, 1)))
        return found

    def _compared(self, normed: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """A few rows at a time, whose logits are computed again for the gradient: all would not fit."""
        rows = rows_at_once(wanted.shape[1])
        parts = [
            checkpoint(_sums, self._head.lm_head.weight, some, theirs, use_reentrant=False)
            for some, theirs in zip(normed.split(rows), wanted.split(rows), strict=True)
        ]
        losses, overlaps = zip(*parts, strict=True)
        return torch.stack(losses).sum() / len(normed), torch.stack(overlaps).sum() / len(normed)


def _sums(weight: Tensor, normed: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    said = (normed @ weight.T).log_softmax(-1)
    with torch.no_grad():
        overlap = torch.minimum(said.exp(), wanted).sum()
    return -(wanted * said).sum(), overlap
