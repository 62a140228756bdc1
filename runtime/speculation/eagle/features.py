"""What a model's layers made of the tokens in its cache, for a draft head: in the same blocks as their keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Features:
    """A row for each position of each cache block, which the model's steps write.

    Copies of blocks and cached prefixes have theirs, too.

    Args:
        fuse: from the states of a step's tokens to rows.
        blocks, block_size: of the cache.
        width: of a row.
        dtype: of a row.
        device: where.
    """

    def __init__(
        self,
        fuse: Callable[[Tensor], Tensor],
        blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._fuse, self.block_size = fuse, block_size
        # Padding writes to the last one, which is nobody's.
        self._rows = torch.zeros(blocks * block_size + 1, width, dtype=dtype, device=device)

    @torch.inference_mode()
    def write(self, slots: Tensor, also: tuple[Tensor, Tensor] | None, states: Tensor) -> None:
        """Keep those of a step (see :class:`...decoder.parts.draft_inputs.AuxStates`)."""
        found = self._fuse(states)
        self._rows[slots.long()] = found
        if also is not None:
            rows, further = also
            self._rows[further.long()] = found[rows.long()]

    def read(self, slots: Tensor) -> Tensor:
        """Those of some positions."""
        return self._rows[slots.long()]

    def by_block(self) -> Tensor:
        """All of it, ``[1, blocks, positions, width]``."""
        return self._rows[:-1].view(1, -1, self.block_size, self._rows.shape[1])

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first rows of a block to another."""
        source, target = source * self.block_size, target * self.block_size
        self._rows[target : target + count] = self._rows[source : source + count]
