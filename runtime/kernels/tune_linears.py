"""Linears' tiles to be tuned: each format at the shapes of a Llama-3-8B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from . import linear_bytes, linear_codes
from .launch import Launch
from .linear_bytes import BytesCase
from .linear_codes import CodesCase
from .linear_dense import DenseCase, linear_dense
from .quantize_rows import quantize_rows
from .restore_codes import restore_codes
from .targets import Target
from .tile import Tile, Tiles
from .timing import copies_needed, seconds
from .tune import Found

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # outputs and columns
ROWS = (1, 16, 512, 64, 4, 32, 2048, 128)  # the most telling first, should time run out
FORMS = ("int4", "bytes-e4m3", "bf16", "bytes-int8", "int8")
BYTES = {"bytes-int8": torch.int8, "bytes-e4m3": torch.float8_e4m3fn}
_DENSE_ROWS = 64  # more are torch's


@dataclass(frozen=True)
class LinearTuning:
    """One product."""

    case: CodesCase | BytesCase | DenseCase

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def stage(self) -> str:
        return f"{self.case.rows} rows"

    @property
    def listed(self) -> str:
        return self.case.key

    def shipped(self, tiles: Tiles) -> Tile:
        """The tile that it has now."""
        return self.case.tile_on(tiles)

    def candidates(self, target: Target) -> list[Tile]:
        """Tiles that may be faster; those that ask for too much memory are left out."""
        case = self.case
        rows, codes = case.rows, isinstance(case, CodesCase)
        found: list[Tile] = []
        if rows <= 16:
            heights = [8, 16] if rows <= 8 else [16]
            steps = (128,) if isinstance(case, BytesCase) else (256, 128) if codes else (256, 128, 64)
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
                    for step in (128,) if isinstance(case, BytesCase) else (64, 128):
                        for stages in (3, 4):
                            for fold in (True, False) if codes and tall <= 64 else (codes,):
                                found.append(Tile(outputs, tall, step, 0, warps, stages, fold))
        fitting = [replace(tile, step=max(tile.step, case.block)) for tile in found]
        limit = target.shared
        fitting = [t for t in fitting if t.stages * t.step * (t.outputs * case.bits // 8 + 2 * t.rows) <= limit]
        return list(dict.fromkeys(fitting))

    def launches(self, tile: Tile, target: Target) -> list[Launch]:
        """What a call launches, on ``meta``."""
        return [replace(self.case, tile=tile).launch(target)]

    def calls(self, device: torch.device) -> list[Callable[[Tile], Tensor]]:
        """The product by several copies of the weight."""
        case = self.case
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(case.rows, case.columns, generator=draw).to(case.dtype).to(device)
        if isinstance(case, CodesCase):
            packed = case.packed(device)
            copies = [packed.copied() for _ in range(copies_needed(packed.nbytes, device))]
            return [lambda tile, w=w: linear_codes.linear_codes(x, w, tile) for w in copies]
        if isinstance(case, DenseCase):
            plain = case.packed(device)
            plains = [plain.copied() for _ in range(copies_needed(plain.nbytes, device))]
            return [lambda tile, w=w: linear_dense(x, w, tile) for w in plains]
        eight = case.packed(device)
        eights = [eight.copied() for _ in range(copies_needed(eight.nbytes, device))]
        codes, scales = quantize_rows(x, case.code, by_block=case.blocks)
        return [lambda tile, w=w: linear_bytes.multiply(codes, scales, w, tile, x.dtype) for w in eights]

    def kept(self, tiles: Tiles, tile: Tile) -> Tiles:
        """Tiles with this one for it; a format's first ones start from its kernel's."""
        key, shape = self.case.key, self.case.shape
        listed = tiles.entries.get(key) or tiles.entries.get(key.split("/")[0], [])
        mine = [entry for entry in listed if entry[0] != shape] + [(shape, tile)]
        return replace(tiles, entries={**tiles.entries, key: mine})


def linears(
    forms: Sequence[str], shapes: Sequence[tuple[int, int]] = SHAPES, rows: Sequence[int] = ROWS
) -> list[LinearTuning]:
    """What is to be tuned: each format at each shape, rows by rows.

    Args:
        forms: of :data:`FORMATS`, :data:`BYTES`, or ``bf16``.
        shapes: outputs and columns.
        rows: of inputs.
    """
    return [
        LinearTuning(_case(form, count, *size))
        for count in rows
        for form in forms
        if form != "bf16" or count <= _DENSE_ROWS
        for size in shapes
    ]


def restoring_pays_from(found: Sequence[Found], told: Callable[[str], object]) -> int | None:
    """From how many rows on restoring int4 weights for torch's product is faster than multiplying them, over all shapes.

    Args:
        found: what was tuned; what it found for int4 is compared.
        told: hears of progress.

    Returns:
        0 for never; None if nothing could be compared.
    """
    device = torch.device("cuda")
    codes: dict[int, float] = {}
    restored: dict[int, float] = {}
    for one in found:
        case = one.of.case if isinstance(one.of, LinearTuning) else None
        if not isinstance(case, CodesCase) or case.form != "int4" or case.rows < 128:
            continue
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


def _case(form: str, rows: int, outputs: int, columns: int) -> CodesCase | BytesCase | DenseCase:
    if form == "bf16":
        return DenseCase(rows, outputs, columns, torch.bfloat16)
    if form in BYTES:
        return BytesCase(BYTES[form], rows, outputs, columns, False, torch.bfloat16)
    group, scale = {"float4": (16, "e4m3"), "float8": (0, "half")}.get(form, (128, "half"))
    return CodesCase(form, rows, outputs, columns, group, torch.bfloat16, scale)
