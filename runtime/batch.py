"""One step's tokens, laid out for the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Cache positions that single tokens gather at once: enough to share the cost of a call, few enough to stay in memory.
_TOGETHER = 16384


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        tokens: their ids.
        start: the position of the first; everything before it is in the cache.
        blocks: the sequence's cache blocks, enough to hold these tokens too.
        grows_to: the most tokens that the sequence may come to have.
        wants: how many of the last tokens need logits.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    grows_to: int
    wants: int

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Singles:
    """Tokens that each attend to a sequence of their own.

    Attributes:
        rows: where they stand in the step.
        slots: cache slots of all they see: ``[tokens, longest]``; what is past a sequence's end must be masked.
        stops: how many positions each sees.
    """

    rows: Tensor
    slots: Tensor
    stops: Tensor


class Batch:
    """The runs of a step, one after another.

    Args:
        runs: at least one.
        block_size: positions in a cache block.
    """

    def __init__(self, runs: list[Run], block_size: int) -> None:
        self.runs = runs
        self.block_size = block_size
        self.tokens = torch.tensor([t for run in runs for t in run.tokens])
        self.positions = torch.tensor([p for run in runs for p in range(run.start, run.stop)])
        self.slots = torch.tensor(
            [
                run.blocks[p // block_size] * block_size + p % block_size
                for run in runs
                for p in range(run.start, run.stop)
            ]
        )
        self.lengths = [(len(run.tokens), run.grows_to) for run in runs]
        starts = [0]
        for run in runs:
            starts.append(starts[-1] + len(run.tokens))
        self.starts = starts
        self.wanted = torch.tensor(
            [end - back for run, end in zip(runs, starts[1:], strict=True) for back in range(run.wants, 0, -1)],
            dtype=torch.int64,
        )

    @cached_property
    def singles(self) -> list[Singles]:
        """Runs of one token that has others before it, in groups that attend together."""
        alone = [i for i, run in enumerate(self.runs) if len(run.tokens) == 1 and run.start > 0]
        alone.sort(key=lambda i: self.runs[i].stop)
        groups: list[list[int]] = []
        for i in alone:
            if not groups or (len(groups[-1]) + 1) * self.runs[i].stop > _TOGETHER:
                groups.append([])
            groups[-1].append(i)
        return [self._singles(group) for group in groups]

    @cached_property
    def longer(self) -> list[int]:
        """All other runs."""
        return [i for i, run in enumerate(self.runs) if len(run.tokens) > 1 or run.start == 0]

    def _singles(self, group: list[int]) -> Singles:
        stops = [self.runs[i].stop for i in group]
        longest = max(stops)
        table = torch.zeros(len(group), -(-longest // self.block_size), dtype=torch.int64)
        for row, (i, stop) in enumerate(zip(group, stops, strict=True)):
            needed = -(-stop // self.block_size)
            table[row, :needed] = torch.tensor(self.runs[i].blocks[:needed])
        slots = (table.unsqueeze(-1) * self.block_size + torch.arange(self.block_size)).flatten(1)[:, :longest]
        return Singles(torch.tensor([self.starts[i] for i in group]), slots, torch.tensor(stops))

    def run_slots(self, i: int) -> Tensor:
        """Cache slots of run ``i``'s whole sequence so far."""
        run = self.runs[i]
        needed = torch.tensor(run.blocks[: -(-run.stop // self.block_size)])
        return (needed.unsqueeze(-1) * self.block_size + torch.arange(self.block_size)).flatten()[: run.stop]
