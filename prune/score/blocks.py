"""Importance scores of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...models.streaming.streamed import HeadFunction
from ...system.storage.activation_store import ActivationStore
from .influence import Influence
from .next_token_loss import next_token_loss


class BlockMeasure(Protocol):
    """Measures a block while hidden states pass through it.

    Attributes:
        sums: what it has added up, to be summed over processes.
    """

    sums: Tensor

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add some tokens, as they leave the block's place without and with it."""
        ...

    @property
    def value(self) -> float:
        """The block's score."""
        ...


@dataclass(frozen=True)
class BlockScore:
    """An importance score of blocks: of each by itself, or of what is left without it.

    Attributes:
        of_block: begins to measure a block; all are measured in one pass.
        of_rest: the sum and the count of a loss over tokens: ``(head, last hidden states, tokens)``; blocks are removed one
            after another, each time the one without which the loss is lowest.
    """

    of_block: Callable[[], BlockMeasure] | None = None
    of_rest: Callable[[HeadFunction, ActivationStore, Tensor], tuple[float, int]] | None = None


# A new score is a row here, and its name in settings/blocks.py.
BLOCK_SCORES: dict[str, BlockScore] = {
    "influence": BlockScore(Influence),
    "loss": BlockScore(of_rest=next_token_loss),
}
