"""The windows of text that each step reads: determined only by a seed and the step, so a rerun reads the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of one step.

    Attributes:
        tokens: ids ``[windows, length]``.
        counted: the weight of each position's prediction, float32 ``[windows, length]``; None for equal weights.
        windows: their numbers in the corpus, ``[windows]``; None if they are not from one.
    """

    tokens: Tensor
    counted: Tensor | None = None
    windows: Tensor | None = None

    @property
    def weight(self) -> float:
        """The sum of its predictions' weights; the last token of a window has none after it."""
        if self.counted is None:
            return float(self.tokens[:, 1:].numel())
        return float(self.counted[:, :-1].sum())

    def on(self, device: torch.device) -> TrainingBatch:
        """The same on a device."""
        counted = None if self.counted is None else self.counted.to(device)
        return TrainingBatch(self.tokens.to(device), counted, self.windows)

    def parts(self, count: int) -> list[TrainingBatch]:
        """The same split into ``count`` batches of about equal size."""
        pieces = [
            None if each is None else each.tensor_split(count) for each in (self.tokens, self.counted, self.windows)
        ]
        return [TrainingBatch(*(None if each is None else each[i] for each in pieces)) for i in range(count)]  # type: ignore[arg-type]


class ShuffledWindows:
    """Windows of a corpus, each once per epoch, in a new order every epoch.

    Args:
        read: returns windows by their numbers.
        count: number of windows.
        batch: windows per step.
        seed: determines the orders.
    """

    def __init__(self, read: Callable[[Tensor], TrainingBatch], count: int, batch: int, seed: int) -> None:
        if count < batch:
            raise ValueError(f"{count} windows are fewer than a batch of {batch}")
        self._read, self._count, self._batch, self._seed = read, count, batch, seed
        self._epoch: tuple[int, Tensor] | None = None

    def at(self, step: int) -> TrainingBatch:
        """The batch of a step, which may span two epochs."""
        first = step * self._batch
        numbers = torch.stack([self._number(place) for place in range(first, first + self._batch)])
        return self._read(numbers)

    def _number(self, place: int) -> Tensor:
        epoch, within = divmod(place, self._count)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch = epoch, torch.randperm(self._count, generator=generator)
        return self._epoch[1][within]
