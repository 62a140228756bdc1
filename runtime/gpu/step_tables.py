"""The device's tables of running sequences: tokens, sampling parameters, and a step's layout."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention.attend_prompts import work_of
from ..kernels.attention.flash import Runs


@dataclass(frozen=True)
class Room:
    """The limits of a step.

    Attributes:
        tokens, sequences: of a step.
        blocks: of a sequence.
        tokens_of_tile: tokens per attention tile.
        drafted: of a step with draft tokens, after each of which one is sampled, too; 0 if no sequence may have any.
    """

    tokens: int
    sequences: int
    blocks: int
    tokens_of_tile: int
    drafted: int = 0

    @property
    def wanted(self) -> int:
        """Tokens after which one is sampled."""
        return max(self.drafted, self.sequences)

    @property
    def tiles(self) -> int:
        """Of runs of several tokens."""
        return self.tokens // self.tokens_of_tile + self.sequences


@dataclass(frozen=True)
class SequenceTokens:
    """Consecutive tokens of one sequence, all but drafts already on the device.

    Attributes:
        start, count: their positions.
        blocks: of the sequence in the cache.
        slot: of the sequence on the device.
        chooses: whether they reach the sequence's end, so that its next token is sampled.
        fresh: whether its blocks differ from the slot's previous ones.
        drafts: the last of them that may come next, and are not yet on the device.
    """

    start: int
    count: int
    blocks: list[int]
    slot: int
    chooses: bool
    fresh: bool
    drafts: SequenceOf[int] = ()

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.count


class TableLayout:
    """A step's lists in one tensor, sent to the device in one copy, at addresses that a graph expects.

    Args:
        room: the limits.
        device: where.

    Attributes:
        positions, owners, slots: of each token: its position, its sequence's slot and its place in the cache.
        rows, counts, stops, tables: see :class:`Runs`.
        work: tiles of attention.
        wanted: int32, the tokens after which one is sampled: the last of each sequence, and those before its draft tokens.
        choosers, lengths: the slot that each wanted token's sequence has, and its tokens so far; -1 for none.
        drafts: of each token: which one it is, if it is not yet on the device; otherwise -1. Only if there is room for any.
    """

    def __init__(self, room: Room, device: torch.device) -> None:
        self.room = room
        sizes = {
            "positions": room.tokens,
            "owners": room.tokens,
            "slots": room.tokens,
            "rows": room.sequences,
            "counts": room.sequences,
            "stops": room.sequences,
            "wanted": room.wanted,
            "choosers": room.wanted,
            "lengths": room.wanted,
            "work": 2 * room.tiles,
        }
        if room.drafted:
            sizes["drafts"] = room.tokens
        self._pinned = device.type == "cuda"
        self._places: dict[str, slice] = {}
        first = 0
        for name, size in sizes.items():
            self._places[name] = slice(first, first + size)
            first += -(-size // 4) * 4  # to align each to 16 bytes
        self._tables = first
        total = first + room.sequences * room.blocks
        # Two, since one may still be in transfer while the next step is prepared.
        self._hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=self._pinned, device="cpu") for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._turn = 0
        self._known = np.zeros((room.sequences, room.blocks), dtype=np.int32)

    def part(self, name: str, count: int | None = None) -> Tensor:
        """A list on the device, or its beginning."""
        if name == "tables":
            return self._device[self._tables :].view(-1, self.room.blocks)[:count]
        found = self._device[self._places[name]]
        return (found.view(-1, 2) if name == "work" else found)[:count]

    def runs(self, count: int) -> Runs:
        """The first runs."""
        rows, counts, stops, tables = (self.part(name, count) for name in ("rows", "counts", "stops", "tables"))
        return Runs(rows, counts, stops, tables)

    def fill(self, parts: list[SequenceTokens], block_size: int) -> None:
        """Build a step's lists and send them to the device asynchronously.

        Args:
            parts: whose tokens these are.
            block_size: positions in a block.
        """
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # the step before the last was sent long ago
        host = self._hosts[self._turn].numpy()
        lists: dict[str, list[int]] = {name: [] for name in self._places if name != "work"}
        tables = host[self._tables :].reshape(-1, self.room.blocks)
        row = 0
        for i, part in enumerate(parts):
            each, blocks = range(part.start, part.stop), part.blocks
            lists["positions"].extend(each)
            lists["owners"].extend([part.slot] * part.count)
            lists["slots"].extend(blocks[p // block_size] * block_size + p % block_size for p in each)
            lists["rows"].append(row)
            row += part.count
            lists["counts"].append(part.count)
            lists["stops"].append(part.stop)
            for before in range(len(part.drafts), -1, -1):
                lists["wanted"].append(row - 1 - before)
                lists["choosers"].append(part.slot if part.chooses else -1)
                lists["lengths"].append(part.stop - before)
            if self.room.drafted:
                lists["drafts"] += [-1] * (part.count - len(part.drafts)) + list(part.drafts)
            # Table entries before a part's tokens are unchanged.
            first, last = 0 if part.fresh else part.start // block_size, -(-part.stop // block_size)
            self._known[part.slot, first:last] = blocks[first:last]
            tables[i, :last] = self._known[part.slot, :last]
        nothing = {"slots": -1, "choosers": -1, "work": -1, "drafts": -1}
        work = work_of(lists["counts"], lists["stops"], self.room.tokens_of_tile)
        for name, values in {**lists, "work": [number for tile in work for number in tile]}.items():
            place = host[self._places[name]]
            place[: len(values)] = values
            place[len(values) :] = nothing.get(name, 0)
        # Tables come last; those of missing runs are not sent.
        used = self._tables + len(parts) * self.room.blocks
        self._device[:used].copy_(self._hosts[self._turn][:used], non_blocking=True)
        if self._pinned:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()  # pyright: ignore[reportOptionalMemberAccess]
