"""Drafts that are computed and chosen on the device, for which the host waits once."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from ...system.progress import Log
from ..requests.sequence import Sequence
from ..speculation.drafter import DraftedChain, PlannedChain
from .sampled_steps import SampledSteps
from .step_kinds import StepKinds
from .step_tables import SequenceTokens, TableLayout


class DraftChains:
    """A drafter's steps, each of which samples the token that the next one reads.

    Args:
        first: those that begin drafts.
        later: those of one token for each draft, which may be the same.
        layout: the tables that both read.

    Attributes:
        later: as given.
        layout: as given.
    """

    def __init__(self, first: SampledSteps, later: SampledSteps, layout: TableLayout) -> None:
        self._first, self.later, self.layout = first, later, layout
        self._kinds = StepKinds(layout.room)

    def warm_up(self, log: Log) -> None:
        """Compile the kernels and capture the graphs."""
        if self._first is not self.later:
            self._first.warm_up(self._kinds.all(), log)
        self.later.warm_up(self._kinds.singles(), log)

    def of(
        self, planned: Mapping[Sequence, PlannedChain], slots: Mapping[Sequence, int], fresh: Set[int]
    ) -> dict[Sequence, DraftedChain]:
        """The drafts of some sequences.

        Args:
            planned: where each begins, and how many tokens it is to have.
            slots: of the sequences on the device.
            fresh: the slots whose blocks differ from those that the tables have.
        """
        sent: list[tuple[list[Sequence], Tensor, Tensor]] = []
        for i in range(max((each.longest for each in planned.values()), default=0)):
            left = [sequence for sequence, each in planned.items() if each.longest > i]
            for mine in [left] if i else self._pieces(planned):
                parts = []
                for sequence in mine:
                    each, slot = planned[sequence], slots[sequence]
                    start, stop = (each.stop - 1 + i, each.stop + i) if i else (each.start, each.stop)
                    blocks = list(sequence.blocks)
                    parts.append(SequenceTokens(start, stop - start, blocks, slot, True, not i and slot in fresh))
                kind = self._kinds.of([part.count for part in parts])
                steps = self.later if i else self._first
                found = steps.start(kind, parts, [sequence.request.grows_to for sequence in mine])
                sent.append((mine, on_host(found.chosen), on_host(found.scores[1])))
        if self._first.place.type == "cuda":
            last = torch.cuda.Event()
            last.record()
            last.synchronize()
        return _collected(planned, sent)

    def _pieces(self, planned: Mapping[Sequence, PlannedChain]) -> list[list[Sequence]]:
        """The sequences whose first tokens fit in a step."""
        found: list[list[Sequence]] = [[]]
        tokens = 0
        for sequence, each in planned.items():
            count = each.stop - each.start
            if tokens + count > self.layout.room.tokens:
                found.append([])
                tokens = 0
            found[-1].append(sequence)
            tokens += count
        return found


def on_host(tensor: Tensor) -> Tensor:
    """An asynchronous copy on the host, valid once the stream has reached it."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu").copy_(tensor, non_blocking=True)


def _collected(
    planned: Mapping[Sequence, PlannedChain], sent: list[tuple[list[Sequence], Tensor, Tensor]]
) -> dict[Sequence, DraftedChain]:
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in planned}
    of_use = dict.fromkeys(planned, 0)
    for mine, chosen, sound in sent:
        for sequence, token, is_sound in zip(mine, chosen.tolist(), sound.tolist(), strict=False):
            # After logits that are not finite nothing is.
            of_use[sequence] += int(bool(is_sound) and of_use[sequence] == len(tokens[sequence]))
            tokens[sequence].append(token)
    return {sequence: DraftedChain(tokens[sequence], of_use[sequence]) for sequence in planned}
