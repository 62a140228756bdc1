"""The next-token loss on the calibration text."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from ...models.streaming.streamed import LOGIT_TOKENS, HeadFunction
from ...system.storage.activation_store import ActivationStore


def next_token_loss(head: HeadFunction, store: ActivationStore, tokens: Tensor) -> tuple[float, int]:
    """The sum of next-token losses, and their count.

    Args:
        head: the part after the blocks.
        store: the last block's outputs.
        tokens: the windows, ``[windows, length]``.
    """
    lost, count = 0.0, 0
    for part in store.batches(LOGIT_TOKENS):
        logits = head(store.read(part))[:, :-1].float()
        wanted = tokens[part, 1:].to(logits.device)
        lost += cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").item()
        count += wanted.numel()
    return lost, count
