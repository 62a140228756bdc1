"""One step's tokens, laid out for the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Cache positions gathered at once for single tokens: enough to amortize a call, few enough to limit memory.
_TOGETHER = 16384


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        tokens: their ids.
        start: the position of the first; everything before it is in the cache.
        blocks: the sequence's cache blocks, enough to hold these tokens too.
        grows_to: the sequence's largest possible length.
        wants: how many of the last tokens need logits.
        adapter: that they are for; None for the model itself.
        decodes: whether they attend as single tokens do, so that each gets what it would get alone; where operators can.
        also: further places for keys and values, ``(which of the tokens, slot)``: in blocks of runs of the same step that branch off this
            one, and attend to them there.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    grows_to: int
    wants: int
    adapter: str | None = None
    decodes: bool = False
    also: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Singles:
    """Tokens that each attend to a different sequence, shorter sequences first.

    Attributes:
        rows: their rows in the step.
        tables: cache blocks of their sequences: ``[tokens, longest]``, filled up with block 0.
        stops: how many positions each attends to.
    """

    rows: Tensor
    tables: Tensor
    stops: Tensor

    def groups(self, block_size: int) -> Iterator[Singles]:
        """Parts that are small enough to gather their sequences at once, each padded to its longest."""
        stops = self.stops.tolist()
        begin = 0
        for i in range(1, len(stops) + 1):
            if i == len(stops) or (i + 1 - begin) * stops[i] > _TOGETHER:
                width = -(-stops[i - 1] // block_size)
                yield Singles(self.rows[begin:i], self.tables[begin:i, :width], self.stops[begin:i])
                begin = i


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
    def also(self) -> tuple[Tensor, Tensor] | None:
        """Rows whose keys and values have further places, and their slots; None if none has."""
        found = [
            (begin + token, slot)
            for run, begin in zip(self.runs, self.starts, strict=False)
            for token, slot in run.also
        ]
        if not found:
            return None
        rows, slots = torch.tensor(found).T.contiguous()
        return rows, slots

    @cached_property
    def adapted(self) -> dict[str, Tensor]:
        """Rows by the adapter that they are for, without those of the model itself."""
        rows: dict[str, list[int]] = {}
        for run, begin in zip(self.runs, self.starts, strict=False):
            if run.adapter is not None:
                rows.setdefault(run.adapter, []).extend(range(begin, begin + len(run.tokens)))
        return {name: torch.tensor(each) for name, each in rows.items()}

    @cached_property
    def singles(self) -> Singles | None:
        """Runs of one token that is not a sequence's first."""
        return self._alone(self.longer)

    @cached_property
    def decoding(self) -> Singles | None:
        """These, and every token of drafts' runs, which follow each other."""
        return self.singles if len(self.prompts) == len(self.longer) else self._alone(self.prompts)

    @cached_property
    def prompts(self) -> list[int]:
        """The runs that are not in :attr:`decoding`."""
        return [i for i in self.longer if not self.runs[i].decodes]

    def _alone(self, others: list[int]) -> Singles | None:
        """The tokens of all but some runs."""
        alone = sorted(set(range(len(self.runs))) - set(others), key=lambda i: self.runs[i].stop)
        if not alone:
            return None
        needed = [self._needed(self.runs[i]) for i in alone]
        longest = len(needed[-1])
        rows, tables, stops = [], [], []
        for i, blocks in zip(alone, needed, strict=True):
            run = self.runs[i]
            rows += range(self.starts[i], self.starts[i + 1])
            tables += [blocks + [0] * (longest - len(blocks))] * len(run.tokens)
            stops += range(run.start + 1, run.stop + 1)
        return Singles(torch.tensor(rows), torch.tensor(tables), torch.tensor(stops))

    @cached_property
    def each_alone(self) -> Singles:
        """Every token as a run of its own."""
        needed = [self._needed(run) for run in self.runs]
        longest = max(map(len, needed))
        filled = torch.tensor([blocks + [0] * (longest - len(blocks)) for blocks in needed])
        counts = torch.tensor([len(run.tokens) for run in self.runs])
        return Singles(torch.arange(len(self.tokens)), filled.repeat_interleave(counts, 0), self.positions + 1)

    @cached_property
    def longer(self) -> list[int]:
        """All other runs."""
        return [i for i, run in enumerate(self.runs) if len(run.tokens) > 1 or run.start == 0]

    @cached_property
    def tables(self) -> dict[int, Tensor]:
        """Cache blocks of the longer runs' sequences so far."""
        return {i: torch.tensor(self._needed(self.runs[i])) for i in self.longer}

    def _needed(self, run: Run) -> list[int]:
        return run.blocks[: -(-run.stop // self.block_size)]
