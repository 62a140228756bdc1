"""Slots for cache blocks in host memory. Touches no tensor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class SavedBlock:
    """A block's content in host memory.

    Attributes:
        slot: where.
        key: of a published block, which others may find; None if it belongs to the sequences that hold it alone.
    """

    slot: int
    key: bytes | None


class HostTier:
    """Blocks in host memory: those of preempted sequences, and published ones that the device's cache has evicted.

    Published blocks without holders stay until their memory is needed, in LRU order.
    A slot that is released may be read by the step that is being scheduled, and a step writes slots before it reads any; so it is
    free from the next step on.

    Args:
        slots: how many blocks there is memory for.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._empty = list(range(slots - 1, -1, -1))
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # published, without holders, oldest first
        self._holders: dict[int, int] = {}
        self._slot_of: dict[bytes, int] = {}
        self._released: dict[int, SavedBlock] = {}

    @property
    def free(self) -> int:
        """Slots that can be written now."""
        return len(self._empty) + len(self._idle)

    def begin_step(self) -> None:
        """Free what the last step has read."""
        for saved in self._released.values():
            if self._holders[saved.slot]:
                continue  # found again
            del self._holders[saved.slot]
            if saved.key is None:
                self._empty.append(saved.slot)
            else:
                self._idle[saved.key] = saved.slot
        self._released.clear()

    def find(self, key: bytes) -> SavedBlock | None:
        """Hold the block of a key, if it is here."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        return self.hold(SavedBlock(slot, key))

    def store(self, key: bytes | None) -> SavedBlock | None:
        """Hold a slot for a block that the step being scheduled is to write; None if all are held. ``key`` is not here yet."""
        if self._empty:
            slot = self._empty.pop()
        elif self._idle:
            oldest, slot = self._idle.popitem(last=False)
            del self._slot_of[oldest]
        else:
            return None
        if key is not None:
            self._slot_of[key] = slot
        self._holders[slot] = 1
        return SavedBlock(slot, key)

    def hold(self, saved: SavedBlock) -> SavedBlock:
        """The same block for one more holder."""
        if saved.key is not None and self._idle.pop(saved.key, None) is not None:
            self._holders[saved.slot] = 0
        self._holders[saved.slot] += 1
        return saved

    def release(self, saved: SavedBlock) -> None:
        """One holder less."""
        self._holders[saved.slot] -= 1
        if self._holders[saved.slot] == 0:
            self._released[saved.slot] = saved

    def forget(self) -> None:
        """Drop all published blocks without holders: the model's weights have changed."""
        self.begin_step()
        for key, slot in self._idle.items():
            del self._slot_of[key]
            self._empty.append(slot)
        self._idle.clear()

    def check(self, holders: list[list[SavedBlock]]) -> None:
        """Assert that every slot is accounted for, given all holders' blocks. For tests."""
        counts: dict[int, int] = dict.fromkeys(self._released, 0)
        for saved in (saved for held in holders for saved in held):
            counts[saved.slot] = counts.get(saved.slot, 0) + 1
        assert counts == self._holders, "holders are miscounted"
        everything = [*self._empty, *self._idle.values(), *self._holders]
        assert sorted(everything) == list(range(self.slots)), "a slot is lost or free twice"
