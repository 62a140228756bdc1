"""What a model's layers made of the tokens in its cache, for a draft head: in the same blocks as their keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# A step's slots, further places ``(rows, slots)`` if there are any, and states.
_Step = tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]


class Features:
    """A row for each position of each cache block, which the model's steps write.

    Copies of blocks and cached prefixes have theirs, too. A model that drafts nothing for a while should not pay for them at each
    step: states of several steps may wait until they are read, or until there are many, and are then fused in one product.

    Args:
        fuse: from the states of tokens to rows.
        blocks, block_size: of the cache.
        width: of a row.
        dtype: of a row.
        device: where.
        most_waiting: states of how many tokens may wait; 0 where steps reuse the memory of their states, or others read the rows.
    """

    def __init__(
        self,
        fuse: Callable[[Tensor], Tensor],
        blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_waiting: int = 0,
    ) -> None:
        self._fuse, self.block_size = fuse, block_size
        self._waiting: list[_Step] = []
        self._most_waiting, self._count = most_waiting, 0
        # Padding writes to the last one, which is nobody's.
        self._rows = torch.zeros(blocks * block_size + 1, width, dtype=dtype, device=device)

    def write(self, slots: Tensor, also: tuple[Tensor, Tensor] | None, states: Tensor) -> None:
        """Keep those of a step (see :class:`...decoder.parts.draft_inputs.AuxStates`)."""
        self._waiting.append((slots, also, states))
        self._count += len(states)
        if self._count >= self._most_waiting:
            self._fuse_waiting()

    @torch.inference_mode()
    def _fuse_waiting(self) -> None:
        steps, self._waiting, self._count = self._waiting, [], 0
        if not steps:
            return
        if len(steps) == 1:
            ((slots, also, states),) = steps
            self._keep(slots, also, self._fuse(states))
            return
        fused = self._fuse(torch.cat([states for _, _, states in steps]))
        places = torch.cat([slots for slots, _, _ in steps])
        if all(also is None for _, also, _ in steps) and len(set(places.tolist())) == len(places):
            self._keep(places, None, fused)
            return
        # In order of the steps, as a later one may have got the block of an earlier.
        for (slots, also, _), found in zip(steps, fused.split([len(slots) for slots, _, _ in steps]), strict=True):
            self._keep(slots, also, found)

    def _keep(self, slots: Tensor, also: tuple[Tensor, Tensor] | None, found: Tensor) -> None:
        self._rows[slots.long()] = found
        if also is not None:
            rows, further = also
            self._rows[further.long()] = found[rows.long()]

    def read(self, slots: Tensor) -> Tensor:
        """Those of some positions."""
        self._fuse_waiting()
        return self._rows[slots.long()]

    def by_block(self) -> Tensor:
        """All of it, ``[1, blocks, positions, width]``, where none may wait."""
        return self._rows[:-1].view(1, -1, self.block_size, self._rows.shape[1])

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first rows of a block to another."""
        self._fuse_waiting()
        source, target = source * self.block_size, target * self.block_size
        self._rows[target : target + count] = self._rows[source : source + count]
