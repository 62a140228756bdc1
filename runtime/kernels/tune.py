"""Finding the fastest tiles for a device, once, into the file that is shipped for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from . import linear_bytes, linear_codes
from .linear_bytes import BytesCase
from .linear_codes import CodesCase
from .precompile import precompile
from .restore_codes import restore_codes
from .targets import target_of
from .tile import Shape, Tile, Tiles, file_name, text, tiles_of
from .timing import copies_needed, seconds

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # outputs and columns of Llama-3-8B
ROWS = (1, 16, 512, 64, 4, 32, 2048, 128)  # the most telling first, should time run out
FORMS = ("int4", "bytes-e4m3", "bytes-int8", "int8")
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


class NotHere(Exception):  # noqa: N818 - it is told, not debugged
    """There is no GPU to tune on, or its file cannot be written."""


def work(forms: Sequence[str], shapes: Sequence[tuple[int, int]] = SHAPES, rows: Sequence[int] = ROWS) -> list[Tunable]:
    """What is to be tuned: each format at each shape, rows by rows.

    Args:
        forms: of :data:`FORMATS`, or ``bytes-int8``, ``bytes-e4m3``.
        shapes: outputs and columns.
        rows: of inputs.
    """
    return [_case(form, count, *size) for count in rows for form in forms for size in shapes]


def tune(cases: Sequence[Tunable], limit_s: float, told: Callable[[str], object]) -> Iterator[Found]:
    """Time candidates of each case on this machine's GPU, until time is up.

    Args:
        cases: from :func:`work`; later ones may not be reached.
        limit_s: no case is begun after so long.
        told: hears of progress.

    Raises:
        NotHere: there is no GPU.
    """
    require_gpu()
    device, start = torch.device("cuda"), time.monotonic()
    rows = list(dict.fromkeys(case.rows for case in cases))
    for count in rows:
        those = [case for case in cases if case.rows == count]
        if time.monotonic() - start > limit_s:
            told(f"{count} rows: not reached in {limit_s:.0f} s")
            continue
        _precompile(those, told)
        for case in those:
            if time.monotonic() - start > limit_s:
                told(f"{case.name}: not reached in {limit_s:.0f} s")
                continue
            best = _fastest(case, device, told)
            torch.cuda.empty_cache()
            if best is not None:
                told(f"{case.name}: {best.seconds * 1e6:.1f} us with {best.tile}")
                yield best


def require_gpu() -> None:
    """Say so if there is none.

    Raises:
        NotHere: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotHere("tiles are tuned on a GPU, and this machine has none; the shipped ones serve without")


def candidates(case: Tunable) -> list[Tile]:
    """Tiles that may be fast for a case; those that ask for too much memory are left out."""
    rows, codes = case.rows, isinstance(case, CodesCase)
    found: list[Tile] = []
    if rows <= 16:
        heights = [8, 16] if rows <= 8 else [16]
        steps = (256, 128) if codes else (128,)
        for height in heights:
            for outputs, warps in ((64, 4), (128, 4), (128, 8)):
                for step in steps:
                    for stages in (3, 4):
                        found += [
                            Tile(outputs, height, step, split, warps, stages, False) for split in (1, 2, 4, 8, 16)
                        ]
    else:
        height = min(128, 1 << (rows - 1).bit_length())
        for tall in [height] if rows < 256 else [128, 256]:
            for outputs, warps in ((128, 4), (128, 8), (64, 4)):
                for step in (64, 128) if codes else (128,):
                    for stages in (3, 4):
                        for fold in (True, False) if codes and tall <= 64 else (codes,):
                            found.append(Tile(outputs, tall, step, 0, warps, stages, fold))
    limit, least = target_of(torch.device("cuda")).shared, case.block
    fitting = [replace(tile, step=max(tile.step, least)) for tile in found]
    fitting = [t for t in fitting if t.stages * t.step * (t.outputs * case.bits // 8 + 2 * t.rows) <= limit]
    return list(dict.fromkeys(fitting))


def restoring_pays_from(found: Sequence[Found], told: Callable[[str], object]) -> int | None:
    """From how many rows on restoring int4 weights for torch's product is faster than multiplying them, over all shapes.

    Args:
        found: from :func:`tune`; what it found for int4 is compared.
        told: hears of progress.

    Returns:
        0 for never; None if nothing could be compared.
    """
    device = torch.device("cuda")
    four = [one for one in found if one.kernel == "linear_codes/int4" and one.shape.rows >= 128]
    codes: dict[int, float] = {}
    restored: dict[int, float] = {}
    for one in four:
        case = CodesCase("int4", one.shape.rows, one.shape.outputs, one.shape.columns, 128, torch.bfloat16)
        weight = case.packed(device)
        x = torch.randn(case.rows, case.columns, dtype=torch.bfloat16, device=device)
        out = torch.empty(case.outputs, case.columns, dtype=torch.bfloat16, device=device)
        taken = seconds([lambda x=x, w=weight, out=out: functional.linear(x, restore_codes(w, x.dtype, out))] * 4)
        told(f"{case.name}: {taken * 1e6:.1f} us restored, {one.seconds * 1e6:.1f} us as codes")
        codes[case.rows] = codes.get(case.rows, 0) + one.seconds
        restored[case.rows] = restored.get(case.rows, 0) + taken
        del weight, x, out
    return pays_from(codes, restored)


def pays_from(codes: dict[int, float], restored: dict[int, float]) -> int | None:
    """The least rows from which on restoring takes less time at all larger ones; 0 if it never does, None for nothing known."""
    pays = 0
    for rows in sorted(codes, reverse=True):
        if restored[rows] >= codes[rows]:
            break
        pays = rows
    return pays if codes else None


def write(found: Sequence[Found], restore_rows: int | None, path: Path | None = None) -> Path:
    """Keep what was found as this device's tiles, over those that it had.

    Args:
        found: from :func:`tune`.
        restore_rows: from :func:`restoring_pays_from`; None leaves what was known.
        path: where to; the shipped place if there is none.

    Raises:
        NotHere: the file cannot be written.
    """
    device = torch.cuda.get_device_name()
    before = tiles_of(torch.device("cuda"))
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    facts["tuned"] = sorted({one.kernel for one in found})
    told = f"{device}; {', '.join(facts['tuned'])} measured by smelt kernels tune, others not"
    rows = before.restore_rows if restore_rows is None else restore_rows
    path = path or destination()
    try:
        partial = path.with_suffix(".partial")
        partial.write_text(text(told, overlaid(before, found), rows, facts))
        return partial.replace(path)
    except OSError as error:
        raise NotHere(f"{path} cannot be written ({error.strerror}); choose another place with --output") from None


def destination() -> Path:
    """Where this device's tiles are kept.

    Raises:
        NotHere: nothing can be written there.
    """
    path = Path(__file__).parent / "configs" / file_name(torch.cuda.get_device_name())
    if not os.access(path.parent, os.W_OK):
        raise NotHere(f"{path.parent} cannot be written; choose another place with --output")
    return path


def overlaid(before: Tiles, found: Sequence[Found]) -> dict[str, list[tuple[Shape, Tile]]]:
    """Known tiles with new ones in place of those for the same shape; a format's first ones start from its kernel's."""
    entries = {key: list(listed) for key, listed in before.entries.items()}
    for one in found:
        listed = entries.get(one.kernel) or entries.get(one.kernel.split("/")[0], [])
        entries[one.kernel] = [entry for entry in listed if entry[0] != one.shape] + [(one.shape, one.tile)]
    return entries


def _fastest(case: Tunable, device: torch.device, told: Callable[[str], object]) -> Found | None:
    """The fastest candidate that computes what the shipped tile does."""
    calls, first, best, tried = _calls(case, device), None, None, 0
    shipped = case.tile_on(tiles_of(device))
    expected = calls[0](shipped).float()
    for tile in dict.fromkeys([shipped, *candidates(case)]):
        try:
            got = calls[0](tile).float()
            if float((got - expected).norm()) > 2e-2 * float(expected.norm()):
                told(f"{case.name}: {tile} computes something else, and is left out")
                continue
            # One look first; what is far behind is not timed well.
            once = seconds([lambda call=call, tile=tile: call(tile) for call in calls], replays=1)
            if first is not None and once > 1.5 * first:
                continue
            taken = seconds([lambda call=call, tile=tile: call(tile) for call in calls], replays=5)
        except Exception as error:
            if not _device_lives():
                told(f"{case.name}: {tile} stopped the device ({error})")
                return None
            continue  # it does not compile, or asks for too much
        tried += 1
        first = taken if first is None else min(first, taken)
        if best is None or taken < best.seconds:
            best = Found(case.key, case.shape, tile, taken, tried)
    return None if best is None else replace(best, tried=tried)


def _device_lives() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _precompile(cases: Sequence[Tunable], told: Callable[[str], object]) -> None:
    """Compile what is to be timed, each kind once."""
    target = target_of(torch.device("cuda"))
    launches = [replace(case, tile=tile).launch(target) for case in cases for tile in candidates(case)]
    told(f"compiling up to {len(launches)} variants for {cases[0].rows} rows")
    precompile(launches, told)


def _case(form: str, rows: int, outputs: int, columns: int) -> Tunable:
    if form.startswith("bytes-"):
        code = {"bytes-int8": torch.int8, "bytes-e4m3": torch.float8_e4m3fn}[form]
        return BytesCase(code, rows, outputs, columns, False, rows <= 16, torch.bfloat16)
    group, scale = {"float4": (16, "e4m3"), "float8": (0, "half")}.get(form, (128, "half"))
    return CodesCase(form, rows, outputs, columns, group, torch.bfloat16, scale)


def _calls(case: Tunable, device: torch.device) -> list[Callable[[Tile], Tensor]]:
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
