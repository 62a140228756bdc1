"""Routing of a step's rows to experts, in blocks for a grouped linear, without synchronization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """A step's choices of experts, ordered by expert.

    A *slot* is one choice: token ``slot // choices``.

    Attributes:
        slots: int32 ``[blocks * rows]``, each block's slots; ``total`` and beyond stands for none.
        block_expert: int32 ``[blocks]``; -1 for blocks that are not used.
        total: how many slots there are.
        per_token: slots that share a row of inputs; 1 if each has its own.
        shares: the routing weights that multiply each slot's outputs; None for none.
    """

    slots: Tensor
    block_expert: Tensor
    total: int
    per_token: int
    shares: Tensor | None


def most_blocks(slots: int, experts: int, rows: int) -> int:
    """The most blocks of ``rows`` that this many slots can fill; the actual number is not known without synchronization."""
    return min(slots, experts) + slots // rows


def route(chosen: Tensor, experts: int, rows: int, *, by_slot: bool = False, shares: Tensor | None = None) -> Routing:
    """Blocks of ``rows`` slots, each of one expert.

    Args:
        chosen: ``[tokens, choices]``, each token's experts.
        experts: how many there are.
        rows: of a block.
        by_slot: whether inputs have a row for each slot, as a first linear's outputs do, instead of each token.
        shares: ``[tokens, choices]``, multiplied by the outputs.
    """
    choices = chosen.shape[1]
    total, device = chosen.numel(), chosen.device
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(
        0, flat.to(torch.int64), torch.ones(total, dtype=torch.int64, device=device)
    )
    blocks = (counts + rows - 1) // rows
    most = most_blocks(total, experts, rows)
    first_block = blocks.cumsum(0) - blocks
    first_slot = counts.cumsum(0) - counts
    owner = flat[order].to(torch.int64)
    target = first_block[owner] * rows + torch.arange(total, device=device) - first_slot[owner]
    slots = torch.full((most * rows,), total, dtype=torch.int32, device=device)
    slots[target] = order.to(torch.int32)
    used = torch.arange(most, device=device)
    expert = torch.searchsorted(blocks.cumsum(0), used, right=True)
    expert = torch.where(expert < experts, expert, -1).to(torch.int32)
    return Routing(
        slots, expert, total, 1 if by_slot else choices, None if shares is None else shares.flatten().contiguous()
    )
