"""What stands between a step's products: norms, rounding, gates, rotary positions with the cache's write, and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.base.launch import overlapping_at
from smelt.runtime.kernels.linear.gate_rows import gate_rows
from smelt.runtime.kernels.rows.cached import layer_cache
from smelt.runtime.kernels.rows.normalize_rows import Norm, normalize_rows
from smelt.runtime.kernels.rows.quantize_rows import quantize_rows
from smelt.runtime.kernels.rows.rotate_and_store import RotaryTables, rotate_and_store
from smelt.runtime.kernels.rows.sample_tokens import sample_tokens
from smelt.runtime.kernels.rows.sampling_state import choices

from ..job import Job, Row
from ..place import Place

ROWS = (1, 8, 64, 512)
_HIDDEN, _WIDE, _VOCABULARY = 4096, 14336, 128256
_HEADS = Heads(32, 8, 128, 128**-0.5, None, None)
B = torch.bfloat16
# What a call is, and the bytes that it must move.
Timed = tuple[Callable[[], object], int]


def jobs(place: Place) -> list[Job]:
    """Each kind at each number of rows."""
    kinds: dict[str, Callable[[Place, int], Timed]] = {
        "norm": _norm,
        "norm, then fp8": partial(_norm, code=torch.float8_e4m3fn),
        "gate": _gate,
        "rounding to fp8": _rounding,
        "rotary positions and cache": _rotation,
        "greedy tokens": partial(_sampling, narrows=False),
        "tokens by top-k and top-p": partial(_sampling, narrows=True),
    }
    counts = (2,) if place.rehearses else ROWS[:1] if place.quick else ROWS
    return [
        Job(f"{name}, {rows} rows", partial(_timed, kind, rows), {"method": name, "rows": rows}, limit_s=30)
        for rows in counts
        for name, kind in kinds.items()
        # Steps choose a token for each of their sequences, of which there are no more.
        if rows <= 256 or "tokens" not in name
    ]


def _timed(kind: Callable[[Place, int], Timed], rows: int, place: Place) -> Iterator[Row]:
    call, moved = kind(place, rows)
    with overlapping_at(rows):
        taken = place.seconds([call] * 4)
    yield {"microseconds": taken * 1e6, "bytes": moved}


def _size(place: Place, size: int) -> int:
    return size // 32 if place.rehearses else size


def _norm(place: Place, rows: int, code: torch.dtype | None = None) -> Timed:
    width = _size(place, _HIDDEN)
    x = torch.randn(rows, width, dtype=B, device=place.device)
    norm = Norm("rms", torch.ones(width, dtype=B, device=place.device), None, 1e-5, True)
    return lambda: normalize_rows(x, norm=norm, code=code), rows * width * (3 if code else 4) + 2 * width


def _gate(place: Place, rows: int) -> Timed:
    width = _size(place, _WIDE)
    x = torch.randn(rows, 2 * width, dtype=B, device=place.device)
    return lambda: gate_rows(x, "silu"), 6 * rows * width


def _rounding(place: Place, rows: int) -> Timed:
    width = _size(place, _WIDE)
    x = torch.randn(rows, width, dtype=B, device=place.device)
    return lambda: quantize_rows(x, torch.float8_e4m3fn), 3 * rows * width


def _rotation(place: Place, rows: int) -> Timed:
    device, width = place.device, (_HEADS.queries + 2 * _HEADS.shared) * _HEADS.size
    x = torch.randn(rows, width, dtype=B, device=device)
    cache = layer_cache(-(-rows // 16), _HEADS.shared, 16, _HEADS.size, "plain", B, device)
    each = torch.arange(rows, dtype=torch.int32, device=device)
    cosines, sines = torch.randn(2, rows, _HEADS.size // 2, dtype=B, device=device)
    turns = RotaryTables(cosines, sines, each)
    return lambda: rotate_and_store(x, _HEADS, cache, each, None, turns), 4 * rows * width


def _sampling(place: Place, rows: int, narrows: bool) -> Timed:
    device, size = place.device, _size(place, _VOCABULARY)
    logits = torch.randn(rows, size, dtype=torch.float32, device=device).mul_(3)
    asked = choices(rows, 4, 64, device)
    if narrows:
        asked.temperature.fill_(0.8)
        asked.top_k.fill_(50)
        asked.top_p.fill_(0.9)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    lengths = torch.full_like(slots, 8)
    return lambda: sample_tokens(logits, slots, lengths, asked), 4 * rows * size
