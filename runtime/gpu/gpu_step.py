"""A step's tokens, laid out on the device for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoder.parts.batch import Batch
from ..kernels.attention.attend_prompts import work_of
from ..kernels.attention.flash import Runs
from ..kernels.rows.rotate_and_store import RotaryTables


@dataclass(frozen=True)
class GpuStep:
    """Runs of tokens, of a few sequences each.

    Attributes:
        slots: int32 ``[tokens]``, where keys and values go; -1 for padding.
        runs: whose tokens these are.
        work: int32 ``[tiles, 2]``, the tiles of runs of several tokens; None if there are none.
        singles: whether some run has a single token.
        rotary: rotary positions, by rope.
        batch: the same as lists, where plain torch computes it.
        also: rows whose keys and values have further places, and the slots of these; None if none has.
    """

    slots: Tensor
    runs: Runs
    work: Tensor | None
    singles: bool
    rotary: dict[str, RotaryTables]
    batch: Batch | None = None
    also: tuple[Tensor, Tensor] | None = None


def gpu_step(batch: Batch, rotations: dict[str, tuple[Tensor, Tensor]], tokens_of_tile: int) -> GpuStep:
    """A step's lists, built on torch's default device.

    Args:
        batch: its runs.
        rotations: by rope, cosines and sines ``[tokens, 1, rotated / 2]``.
        tokens_of_tile: how many tokens a tile of attention takes.
    """
    counts = [len(run.tokens) for run in batch.runs]
    stops = [run.stop for run in batch.runs]
    needed = [-(-stop // batch.block_size) for stop in stops]
    longest = max(needed)
    tables = [run.blocks[:n] + [0] * (longest - n) for run, n in zip(batch.runs, needed, strict=True)]
    rows, many, last, table = (_integers(each) for each in (batch.starts[:-1], counts, stops, tables))
    work = work_of(counts, stops, tokens_of_tile)
    each = torch.arange(len(batch.tokens), dtype=torch.int32)
    return GpuStep(
        batch.slots.to(torch.int32),
        Runs(rows, many, last, table),
        _integers(work) if work else None,
        any(count == 1 for count in counts),
        {name: RotaryTables(cosine.flatten(1), sine.flatten(1), each) for name, (cosine, sine) in rotations.items()},
        batch,
        None if batch.also is None else (batch.also[0], batch.also[1].to(torch.int32)),
    )


def _integers(values: list[int] | list[list[int]] | list[tuple[int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
