"""Allocation of cache blocks. Touches no tensor, so the scheduler and the simulator share it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from hashlib import blake2b

from .host_tier import HostTier, SavedBlock

Copy = tuple[int, int]


class BlockCache:
    """Blocks of cache positions: allocated on demand, reference-counted, shared, copied on write.

    A full, computed block can be published under a key made of all tokens up to its end. Later sequences
    with the same prefix find it; it is not written again. Published blocks without holders stay
    available until their memory is needed, in LRU order.

    Args:
        blocks: how many there are.
        block_size: positions in each.
        enable_prefix_caching: whether published blocks are found again.
        host: slots in host memory, for blocks that are evicted or whose sequence is preempted.

    Attributes:
        swap_out: blocks of this step to copy to slots, ``(block, slot)``, before anything else.
        swap_in: slots to copy to blocks of this step, ``(slot, block)``, after that.
    """

    def __init__(
        self, blocks: int, block_size: int, *, enable_prefix_caching: bool = True, host: HostTier | None = None
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._share = enable_prefix_caching
        self._empty = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without holders, oldest first
        self._holders = [0] * blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.host = host
        self.swap_out: list[Copy] = []
        self.swap_in: list[Copy] = []

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._empty) + len(self._idle)

    def forget(self) -> None:
        """Drop all published blocks: the model's weights have changed."""
        self._empty.extend(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._key_of.clear()
        if self.host is not None:
            self.host.forget()

    def begin_step(self) -> None:
        """Forget the last step's copies."""
        self.swap_out, self.swap_in = [], []
        if self.host is not None:
            self.host.begin_step()

    def needed(self, length: int) -> int:
        """Blocks for ``length`` positions."""
        return -(-length // self.block_size)

    def find(self, tokens: list[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        """Hold the published blocks of a prefix of ``tokens``, without the last token, whose logits are needed.

        Args:
            tokens: of the whole sequence.
            salt: distinguishes sequences whose equal tokens have different keys and values.

        Returns:
            The blocks and their keys.
        """
        blocks: list[int] = []
        keys: list[bytes] = []
        if not self._share:
            return blocks, keys
        for i in range((len(tokens) - 1) // self.block_size):
            key = self._key(keys[-1] if keys else salt, tokens, i)
            block = self._block_of.get(key)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
            keys.append(key)
        return blocks, keys

    def find_saved(self, keys: list[bytes], tokens: list[int], salt: bytes) -> list[SavedBlock]:
        """Hold the blocks in host memory that continue a prefix found by :meth:`find`, and append their keys to ``keys``."""
        saved: list[SavedBlock] = []
        if not self._share or self.host is None:
            return saved
        for i in range(len(keys), (len(tokens) - 1) // self.block_size):
            key = self._key(keys[-1] if keys else salt, tokens, i)
            found = self.host.find(key)
            if found is None:
                break
            saved.append(found)
            keys.append(key)
        return saved

    def save(self, blocks: list[int], keys: list[bytes], computed: int) -> list[SavedBlock] | None:
        """Save the blocks of ``computed`` positions in host memory, and release all.

        Returns:
            Where they are; None, with nothing changed, if host memory is full.
        """
        assert self.host is not None
        count = self.needed(computed)
        known = [self.host.find(key) for key in keys[:count]] + [None] * (count - len(keys))
        if known.count(None) > self.host.free:
            self.discard([found for found in known if found is not None])
            return None
        saved: list[SavedBlock] = []
        for i, found in enumerate(known):
            if found is None:
                found = self.host.store(keys[i] if i < len(keys) else None)
                assert found is not None
                self.swap_out.append((blocks[i], found.slot))
            saved.append(found)
        self.release(blocks)
        return saved

    def restore(self, blocks: list[int], saved: list[SavedBlock]) -> None:
        """Extend ``blocks`` by those in host memory, which are released there; there are enough free blocks."""
        for each in saved:
            block = None if each.key is None else self._block_of.get(each.key)
            if block is not None:
                self._hold(block)
            else:
                block = self._take()
                self.swap_in.append((each.slot, block))
                if each.key is not None:
                    self._block_of[each.key], self._key_of[block] = block, each.key
            blocks.append(block)
        self.discard(saved)

    def discard(self, saved: list[SavedBlock]) -> None:
        """Release blocks in host memory; the list is emptied."""
        assert self.host is not None or not saved
        for each in saved:
            self.host.release(each)  # pyright: ignore[reportOptionalMemberAccess]
        saved.clear()

    def grow(self, blocks: list[int], start: int, stop: int) -> list[Copy] | None:
        """Extend ``blocks`` to positions up to ``stop``, and make those from ``start`` on writable.

        Returns:
            Blocks to copy before any write; None, with nothing changed, if there are too few free blocks.
        """
        first, count = start // self.block_size, len(blocks)
        more = -(-stop // self.block_size) - count
        # Nearly always a decode's token goes to a block of its own that has room.
        if more <= 0 and first == count - 1 and self._holders[blocks[first]] == 1:
            return []
        shared = [i for i in range(first, count) if self._holders[blocks[i]] > 1]
        if len(shared) + max(0, more) > self.free:
            return None
        copies = []
        for i in shared:
            copy = self._take()
            copies.append((blocks[i], copy))
            self._release(blocks[i])
            blocks[i] = copy
        blocks.extend(self._take() for _ in range(more))
        return copies

    def fork(self, blocks: list[int]) -> list[int]:
        """The same blocks for one more holder."""
        for block in blocks:
            self._hold(block)
        return list(blocks)

    def shared(self, blocks: list[int]) -> list[int]:
        """Those of a sequence's blocks that others hold, too: its first ones, since who shares a block shares all before it."""
        return blocks[: bisect_left(blocks, True, key=lambda block: self._holders[block] == 1)]

    def publish(self, blocks: list[int], keys: list[bytes], tokens: list[int], computed: int, salt: bytes) -> None:
        """Publish the blocks that ``computed`` positions fill, and append their keys to ``keys``."""
        if not self._share:
            return
        for i in range(len(keys), computed // self.block_size):
            key = self._key(keys[-1] if keys else salt, tokens, i)
            keys.append(key)
            if key not in self._block_of and blocks[i] not in self._key_of:
                self._block_of[key] = blocks[i]
                self._key_of[blocks[i]] = key

    def release(self, blocks: list[int]) -> None:
        """Release blocks; the list is emptied."""
        for block in reversed(blocks):  # so that the end of a sequence is evicted before its beginning
            self._release(block)
        blocks.clear()

    def check(self, holders: list[list[int]]) -> None:
        """Assert that every block is accounted for, given all holders' blocks. For tests."""
        counts = [0] * self.blocks
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders are miscounted"
        unheld = {b for b in range(self.blocks) if counts[b] == 0}
        assert sorted([*self._empty, *self._idle]) == sorted(unheld), "a block is lost or free twice"
        assert all(self._block_of[key] == block for block, key in self._key_of.items())
        assert not set(self._empty) & set(self._key_of), "an empty block is published"

    def _key(self, before: bytes, tokens: list[int], i: int) -> bytes:
        part = tokens[i * self.block_size : (i + 1) * self.block_size]
        return blake2b(before + array("q", part).tobytes(), digest_size=16).digest()

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._key_of.pop(block)
            del self._block_of[key]
            self._spill(block, key)
        self._holders[block] = 1
        return block

    def _spill(self, block: int, key: bytes) -> None:
        """Keep an evicted block in host memory, if there is room."""
        if self.host is None:
            return
        kept = self.host.find(key)
        if kept is None:
            kept = self.host.store(key)
            if kept is None:
                return
            self.swap_out.append((block, kept.slot))
        self.host.release(kept)

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.append(block)
