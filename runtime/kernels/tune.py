"""Finding the fastest tiles for a device, once, into the file that is shipped for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional

from . import linear_bytes, linear_codes
from .linear_bytes import BytesCase
from .linear_codes import CodesCase
from .restore_codes import restore_codes
from .targets import target_of
from .tile import Shape, Tile, file_name, text
from .timing import copies_needed, seconds

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # outputs and columns of Llama-3-8B
ROWS = (1, 4, 16, 32, 64, 128, 512, 2048)
Tunable = CodesCase | BytesCase


@dataclass(frozen=True)
class Found:
    """The fastest tile of one shape.

    Attributes:
        kernel: with its format, as tiles are looked up.
        shape: of the product.
        tile: the fastest.
        seconds: its time.
        tried: how many were.
    """

    kernel: str
    shape: Shape
    tile: Tile
    seconds: float
    tried: int


def work(forms: Sequence[str], shapes: Sequence[tuple[int, int]] = SHAPES, rows: Sequence[int] = ROWS) -> list[Tunable]:
    """What is to be tuned: each format at each shape.

    Args:
        forms: of :data:`FORMATS`, or ``bytes-int8``, ``bytes-e4m3``.
        shapes: outputs and columns.
        rows: of inputs.
    """
    found: list[Tunable] = []
    for form in forms:
        for outputs, columns in shapes:
            for count in rows:
                found.append(_case(form, count, outputs, columns))
    return found


def tune(cases: Sequence[Tunable], told: Callable[[str], object]) -> Iterator[Found]:
    """Time candidates of each case on this machine's GPU.

    Args:
        cases: from :func:`work`.
        told: hears of progress.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tiles are tuned on a GPU, and this machine has none; the shipped ones serve without")
    device = torch.device("cuda")
    precompile([replace(case, tile=tile) for case in cases for tile in candidates(case)], told)
    for case in cases:
        best, fastest, tried = None, float("inf"), 0
        calls = _calls(case, device)
        for tile in candidates(case):
            try:
                time = seconds([lambda call=call, tile=tile: call(tile) for call in calls])
            except (triton.OutOfResources, RuntimeError) as error:
                if "out of memory" in str(error).lower() or isinstance(error, triton.OutOfResources):
                    continue
                raise
            tried += 1
            if time < fastest:
                best, fastest = tile, time
        if best is None:
            told(f"{case.name}: no tile fits")
            continue
        told(f"{case.name}: {fastest * 1e6:.1f} us with {best}")
        yield Found(case.key, case.shape, best, fastest, tried)


def candidates(case: Tunable) -> list[Tile]:
    """Tiles that may be fast for a case; those that ask for too much memory are left out."""
    rows = case.rows
    heights = [height for height in (8, 16, 32, 64, 128, 256) if height <= max(8, triton.next_power_of_2(rows))][-2:]
    steps = (64, 128, 256) if isinstance(case, CodesCase) else (128,)
    found = []
    for height in heights:
        for outputs in (64, 128):
            for step in steps:
                for warps in (4, 8):
                    for stages in (2, 3, 4, 5):
                        for fold in (False, True) if isinstance(case, CodesCase) and height >= 32 else (False,):
                            for split in (1, 2, 4, 8) if rows <= 64 else (1,):
                                found.append(Tile(outputs, height, step, split, warps, stages, fold))
    limit = target_of(torch.device("cuda")).shared
    return [
        tile for tile in found if tile.stages * tile.step * (tile.outputs * case.bits // 8 + 2 * tile.rows) <= limit
    ]


def precompile(cases: Sequence[Tunable], told: Callable[[str], object]) -> None:
    """Compile on all processors what will be timed, so that the GPU does not wait for it."""
    distinct = {
        replace(case, tile=replace(case.tile, split=min(case.tile.split, 2))): None for case in cases if case.tile
    }
    told(f"compiling {len(distinct)} variants")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_warm, distinct, chunksize=8))


def restoring_pays_from(found: Sequence[Found], told: Callable[[str], object]) -> int:
    """From how many rows on restoring int4 weights for torch's product is faster than multiplying them; 0 for never.

    Args:
        found: from :func:`tune`; what it found for int4 is compared.
        told: hears of progress.
    """
    device = torch.device("cuda")
    four = [one for one in found if one.kernel == "linear_codes/int4" and one.shape.rows >= 128]
    pays: list[int] = []
    for one in sorted(four, key=lambda one: -one.shape.rows):
        case = CodesCase("int4", one.shape.rows, one.shape.outputs, one.shape.columns, 128, torch.bfloat16)
        weight = case.packed(device)
        x = torch.randn(case.rows, case.columns, dtype=torch.bfloat16, device=device)
        out = torch.empty(case.outputs, case.columns, dtype=torch.bfloat16, device=device)
        taken = seconds([lambda x=x, w=weight, out=out: functional.linear(x, restore_codes(w, x.dtype, out))] * 4)
        told(f"{case.name}: {taken * 1e6:.1f} us restored, {one.seconds * 1e6:.1f} us as codes")
        if taken < one.seconds:
            pays.append(one.shape.rows)
    losing = [one.shape.rows for one in four if one.shape.rows not in pays]
    return min((rows for rows in pays if rows > max(losing, default=0)), default=0)


def write(found: Sequence[Found], restore_rows: int, path: Path | None = None) -> Path:
    """Keep what was found as this device's tiles.

    Args:
        found: from :func:`tune`.
        restore_rows: from :func:`restoring_pays_from`.
        path: where to; the shipped place if there is none.
    """
    device = torch.cuda.get_device_name()
    entries: dict[str, list[tuple[Shape, Tile]]] = {}
    for one in found:
        entries.setdefault(one.kernel, []).append((one.shape, one.tile))
    general = {key.split("/")[0] for key in entries}
    for kernel in general:
        # Formats that were not tuned take those of the most common one.
        entries.setdefault(kernel, next(tiles for key, tiles in entries.items() if key.startswith(f"{kernel}/")))
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    path = path or Path(__file__).parent / "configs" / file_name(device)
    partial = path.with_suffix(".partial")
    partial.write_text(text(f"{device}; measured by smelt kernels tune", entries, restore_rows, facts))
    return partial.replace(path)


def _case(form: str, rows: int, outputs: int, columns: int) -> Tunable:
    if form.startswith("bytes-"):
        code = {"bytes-int8": torch.int8, "bytes-e4m3": torch.float8_e4m3fn}[form]
        return BytesCase(code, rows, outputs, columns, False, rows <= 16, torch.bfloat16)
    group, scale = {"float4": (16, "e4m3"), "float8": (0, "half")}.get(form, (128, "half"))
    return CodesCase(form, rows, outputs, columns, group, torch.bfloat16, scale)


def _warm(case: Tunable) -> None:
    # What does not compile says so when it is timed.
    with suppress(Exception):
        case.launch(target_of(torch.device("cuda"))).warm()


def _calls(case: Tunable, device: torch.device) -> list[Callable[[Tile], object]]:
    """The case's product on several copies of its weight."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(case.rows, case.columns, generator=draw).to(case.dtype).to(device)
    if isinstance(case, CodesCase):
        weight = case.packed(device)
        weights = [weight.copied() for _ in range(copies_needed(weight.nbytes, device))]
        return [lambda tile, w=w: linear_codes.linear_codes(x, w, tile) for w in weights]
    fused, weight8 = case.fused, case.packed(device)
    weights8 = [weight8.copied() for _ in range(copies_needed(weight8.nbytes, device))]
    return [lambda tile, w=w: linear_bytes.linear_bytes(x, w, tile, fused=fused) for w in weights8]
