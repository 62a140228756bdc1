"""Where a draft model's keys and values are: in the verifier's cache, or in one of its own with the same blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from weakref import WeakKeyDictionary

from ..decoder.parts.kv_cache import KeysValues
from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan

NO_BRANCHES: Mapping[int, list[int]] = MappingProxyType({})


class DraftCache(Protocol):
    """A draft model's keys and values.

    Attributes:
        store: that they are in; sequences' blocks are the verifier's.
    """

    store: KeysValues

    def begin(self, plan: StepPlan) -> None:
        """A step begins, before whose computation blocks are copied."""
        ...

    def known(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens have keys and values; the last token never counts."""
        ...

    def computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Those of some of its tokens were computed."""
        ...

    def branched(self, block: int | None, spare: int) -> None:
        """A branch goes on in a spare block, with what is in the chain's; None if it begins there."""
        ...

    def drafted(self, sequence: Sequence, draft: list[int], branches: Mapping[int, list[int]] = NO_BRANCHES) -> None:
        """So were those of its last token and of all but the last of a draft after it.

        Args:
            sequence: the sequence.
            draft: the chain.
            branches: in each spare block in which a branch went on that branch, with what the chain has before it.
        """
        ...

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """A sequence gets another block for one of its own, which had the same up to where a branch left the chain."""
        ...


class SharedCache:
    """The verifier's: it has computed all tokens but the last one of any sequence that drafts are for.

    Args:
        store: the verifier's keys and values.
    """

    def __init__(self, store: KeysValues) -> None:
        self.store = store

    def begin(self, plan: StepPlan) -> None:
        """Nothing: the verifier copies its blocks."""

    def known(self, sequence: Sequence) -> int:
        """All but the last one."""
        return len(sequence.tokens) - 1

    def computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Nothing."""

    def branched(self, block: int | None, spare: int) -> None:
        """Copy what is there; verification writes the verifier's in its place."""
        if block is not None:
            self.store.copy([(block, spare)])

    def drafted(self, sequence: Sequence, draft: list[int], branches: Mapping[int, list[int]] = NO_BRANCHES) -> None:
        """Nothing: verification writes the verifier's in their place."""

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """Nothing: verification has written the new one."""


@dataclass
class _State:
    """What is computed of a sequence: ``count`` tokens, while its request has been preempted ``preemptions`` times.

    ``draft`` is the last one after them, ``branches`` are what is in spare blocks instead of it.
    """

    preemptions: int
    count: int
    draft: list[int]
    branches: Mapping[int, list[int]] = field(default_factory=dict)


class OwnCache:
    """One of its own: the same blocks of the same sequences, whose content the draft model computes when it first drafts for them.

    Args:
        store: keys and values of as many blocks as the verifier's cache has.
        blocks: how many.
    """

    def __init__(self, store: KeysValues, blocks: int) -> None:
        self.store = store
        self._keys: list[bytes | None] = [None] * blocks  # of what is completely computed in each block
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()

    def begin(self, plan: StepPlan) -> None:
        """Copy the blocks that the verifier copies."""
        self.store.copy(plan.copies)
        for source, target in plan.copies:
            self._keys[target] = self._keys[source]

    def known(self, sequence: Sequence) -> int:
        """What it has computed since the sequence has its blocks, or for others with the same beginning."""
        size = self.store.block_size
        state = self._states.get(sequence)
        if state is None or state.preemptions != sequence.request.preemptions:
            common = 0
            for block, key in zip(sequence.blocks, sequence.keys, strict=False):
                if self._keys[block] != key:
                    break
                common += 1
            state = self._states[sequence] = _State(sequence.request.preemptions, common * size, [])
        if state.draft:
            after = sequence.tokens[state.count :]
            agreeing = next((i for i, (a, b) in enumerate(zip(after, state.draft, strict=False)) if a != b), None)
            agreeing = min(len(after), len(state.draft)) if agreeing is None else agreeing
            state.count, state.draft = state.count + min(agreeing, len(state.draft) - 1), []
        state.count = min(state.count, len(sequence.tokens) - 1)
        for i in range(min(state.count // size, len(sequence.keys))):
            self._keys[sequence.blocks[i]] = sequence.keys[i]
        return state.count

    def computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Go on from there."""
        self._write(sequence, start, stop)
        self._states[sequence].count = stop

    def branched(self, block: int | None, spare: int) -> None:
        """Copy what is there."""
        self._keys[spare] = None
        if block is not None:
            self.store.copy([(block, spare)])

    def drafted(self, sequence: Sequence, draft: list[int], branches: Mapping[int, list[int]] = NO_BRANCHES) -> None:
        """Whether they are of use is known when the draft was verified."""
        length = len(sequence.tokens)
        self._write(sequence, length - 1, length + len(draft) - 1)
        state = self._states[sequence]
        state.count, state.draft, state.branches = length, list(draft), branches

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """Copy the draft model's, if the branch did not go on there."""
        state = self._states.get(sequence)
        if state is not None and by in state.branches:
            state.draft = state.branches[by]
            return
        self.store.copy([(block, by)])
        self._keys[by] = self._keys[block]

    def _write(self, sequence: Sequence, start: int, stop: int) -> None:
        size = self.store.block_size
        for i in range(start // size, -(-stop // size)):
            self._keys[sequence.blocks[i]] = None
