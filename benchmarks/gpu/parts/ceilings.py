"""What the device can do at most: bytes copied, bytes only read, and operations of a large product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from smelt.runtime.kernels.tools import timing
from torch import Tensor

from ..job import Job, Row
from ..place import Place

_READ = 1 << 30
_TILE, _TILES = 4096, 8  # numbers that a program reads at once, and how often


@triton.jit
def _read_rows(source, largest, TILE: tl.constexpr, TILES: tl.constexpr):
    """A decode step reads weights and writes next to nothing: so does this."""
    program = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    found = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES):
        found = tl.maximum(found, tl.load(source + (program * TILES + tile) * TILE + inner))
    tl.store(largest + program, tl.max(found, 0))


def jobs(_: Place) -> list[Job]:
    """All three."""
    return [Job("copy", _copy), Job("read", _read), Job("large product", _matmul)]


def _copy(place: Place) -> Iterator[Row]:
    """Bytes read and bytes written."""
    yield {"copy_bytes_per_s": 1.0 if place.rehearses else timing.copy_rate(place.device)}


def _read(place: Place) -> Iterator[Row]:
    count = (1 << 18 if place.rehearses else _READ) // 4
    sources = [torch.randint(1 << 30, (count,), dtype=torch.int32, device=place.device) for _ in range(2)]
    read: Any = _read_rows  # Triton's own types lack a launch's options
    programs = count // (_TILE * _TILES)
    largest = torch.empty(programs, dtype=torch.int32, device=place.device)

    def call(source: Tensor) -> None:
        read[(programs,)](source, largest, TILE=_TILE, TILES=_TILES, num_warps=8)

    taken = place.seconds([lambda source=source: call(source) for source in sources])
    call(sources[0])
    wrong = not torch.equal(largest, sources[0].view(programs, -1).amax(1))
    yield {"read_bytes_per_s": 4 * count / taken, "problem": "not all was read" if wrong else None}


def _matmul(place: Place) -> Iterator[Row]:
    yield {"matmul_per_s": 1.0 if place.rehearses else timing.matmul_rate(place.device)}
