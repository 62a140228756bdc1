"""Tuning of linears' tiles: each format at the shapes of a Llama-3-8B.

All combinations would take hours. So a program's outputs and warps are tuned first, then steps and stages, then splits, and
finally the programs again, each time around the best so far: about 60 tiles of some 1500 for few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ....system.progress import Log
from ..base.launch import Launch
from ..base.targets import Target
from ..linear import linear_bytes, linear_codes
from ..linear.linear_bytes import BytesCase
from ..linear.linear_codes import CodesCase
from ..linear.linear_dense import DenseCase, linear_dense
from ..linear.restore_codes import restore_codes
from ..rows.quantize_rows import quantize_rows
from ..tiles.tile import Tile, Tiles, divides, filling, shared
from .timing import copies_needed, seconds
from .tune import Found

# Outputs and columns of Llama-3-8B as the engine multiplies them: out, gate with inputs, down, queries with keys and values, head; and
# half of the second, which is measured by itself.
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096), (14336, 4096))
_GATED = (28672, 4096)
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 32)
# Thousands of programs of one or two warps that load all before they compute: far from the others, so tried as they are.
_TINY = (Tile(16, 8, 128, 32, 1, 1, False), Tile(16, 8, 512, 8, 1, 1, False), Tile(32, 8, 512, 8, 2, 1, False))
_COPIES = 2  # of a weight that is larger than the device's cache
ROWS = (1, 16, 512, 64, 4, 32, 2048, 128)  # the most important first, should time run out
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
    def rows(self) -> int:
        return self.case.rows

    @property
    def listed(self) -> str:
        return self.case.key

    def shipped(self, tiles: Tiles) -> Tile:
        """Its current tile."""
        return self.case.tile_on(tiles)

    @property
    def rounds(self) -> int:
        """How often tiles around the best are tried."""
        return 4

    def around(self, best: Tile, done: int, target: Target) -> list[Tile]:
        """Tiles that may be faster than the best so far: other programs, iterations, splits, and programs once more."""
        if done in (0, 3):
            found = self._programs(best)
            if done == 0 and self.case.rows <= 8:
                found += [replace(tile, step=128) if isinstance(self.case, BytesCase) else tile for tile in _TINY]
            if done == 3:  # as many programs in all
                found = [replace(tile, split=max(1, best.split * tile.outputs // best.outputs)) for tile in found]
        else:
            found = self._iterations(best) if done == 1 else self._splits(best, target)
        return self._of(found, target)

    def _programs(self, tile: Tile) -> list[Tile]:
        """Sizes of programs; warps that share out the columns already are tried without splits first."""
        rows = self.case.rows
        if rows <= 16:
            heights = (8, 16) if rows <= 8 else (16,)
            sizes = ((64, 4, 1), (32, 2, 1), (16, 1, 1), (128, 4, 1), (128, 8, 1), (64, 2, 1))
            if rows <= 8 and self.case.key != "linear_codes/sparse4":
                sizes = (*sizes, (16, 8, 8), (16, 4, 4), (32, 4, 4), (16, 2, 2), (32, 2, 2))
        elif rows <= 64:
            heights, sizes = (1 << (rows - 1).bit_length(),), ((128, 8, 1), (64, 4, 1), (128, 4, 1))
        else:
            heights = (128,) if rows < 256 else (128, 256)
            sizes = ((128, 8, 1), (128, 4, 1), (64, 4, 1), (256, 8, 1))
        found = [
            replace(tile, outputs=outputs, rows=height, warps=warps, slices=slices, split=int(slices > 1))
            for height in heights
            for outputs, warps, slices in sizes
        ]
        if isinstance(self.case, CodesCase) and rows > 16:
            found = [replace(each, fold=fold) for each in found for fold in (tile.fold, not tile.fold)]
        return found

    def _iterations(self, tile: Tile) -> list[Tile]:
        steps = (128,) if isinstance(self.case, BytesCase) else (128, 256, 64, 512) if tile.rows <= 16 else (64, 128)
        if tile.slices > 1 and isinstance(self.case, CodesCase):
            return [replace(tile, step=step, stages=stages) for step in steps for stages in (1, 2)]
        # Long iterations are unrolled: with many of them on their way a program fills a unit alone, and with slices registers spill.
        return [
            replace(tile, step=step, stages=stages, split=tile.split if tile.slices > 1 else 0)
            for step in (steps if tile.slices == 1 else steps[:3])
            for stages in ((1, 2) if step == 512 else (1, 2, 3, 4, 5, 6) if tile.rows <= 16 else (2, 3, 4, 5))
        ]

    def _splits(self, tile: Tile, target: Target) -> list[Tile]:
        if not target.splits:
            return []
        steps = -(-self.case.columns // (tile.step * tile.slices))
        return [replace(tile, split=split) for split in _SPLITS if split <= steps]

    def _of(self, tiles: list[Tile], target: Target) -> list[Tile]:
        """Each once, with its split and an iteration of at least a block; left out is what asks for too much memory, or for registers.

        Where parts of a sum are added up apart, groups before they are scaled and e4m3's, a thread has twice as many.
        """
        case, found = self.case, list[Tile]()
        twice = isinstance(case, CodesCase) or (isinstance(case, BytesCase) and case.code != torch.int8)
        for tile in tiles:
            tile = replace(tile, step=max(tile.step, case.block))
            if not divides(tile, case.columns, case.block) or shared(tile, case.shape) > target.shared:
                continue
            sums = tile.slices * tile.outputs * tile.rows // (32 * tile.warps)
            if sums > (64 if twice and not tile.fold else 128):
                continue
            if not tile.split:
                tile = filling(tile, case.shape, target.units) if target.splits else replace(tile, split=1)
            found.append(tile)
        return list(dict.fromkeys(found))

    def launches(self, tile: Tile, target: Target) -> list[Launch]:
        """A call's launches, on ``meta``."""
        return [replace(self.case, tile=tile).launch(target)]

    def calls(self, device: torch.device) -> list[Callable[[Tile], Tensor]]:
        """The product with several copies of the weight."""
        case = self.case
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(case.rows, case.columns, generator=draw).to(case.dtype).to(device)
        if isinstance(case, CodesCase):
            packed = case.packed(device)
            copies = [packed.copied() for _ in range(copies_needed(packed.nbytes, device, _COPIES))]
            return [lambda tile, w=w: linear_codes.linear_codes(x, w, tile) for w in copies]
        if isinstance(case, DenseCase):
            plain = case.packed(device)
            plains = [plain.copied() for _ in range(copies_needed(plain.nbytes, device, _COPIES))]
            return [lambda tile, w=w: linear_dense(x, w, tile) for w in plains]
        eight = case.packed(device)
        eights = [eight.copied() for _ in range(copies_needed(eight.nbytes, device, _COPIES))]
        codes, scales = quantize_rows(x, case.code, by_block=case.blocks)
        return [lambda tile, w=w: linear_bytes.multiply(codes, scales, w, tile, x.dtype) for w in eights]

    def kept(self, tiles: Tiles, tile: Tile) -> Tiles:
        """A copy of the tiles with this one for it; a format's first ones start from its kernel's."""
        key, shape = self.case.key, self.case.shape
        listed = tiles.entries.get(key) or tiles.entries.get(key.split("/")[0], [])
        mine = [entry for entry in listed if entry[0] != shape] + [(shape, tile)]
        return replace(tiles, entries={**tiles.entries, key: mine})


def linears(
    forms: Sequence[str], shapes: Sequence[tuple[int, int]] = SHAPES, rows: Sequence[int] = ROWS
) -> list[LinearTuning]:
    """The shapes to tune: each format at each shape, for each number of rows.

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


def restoring_pays_from(found: Sequence[Found], log: Log) -> int | None:
    """The number of rows from which restoring int4 weights for torch's product is faster than the kernel, over all shapes.

    Args:
        found: the tuned tiles, of which those for int4 are compared.
        log: gets messages for the user.

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
        log(f"{case.name}: {taken * 1e6:.1f} us restored, {one.seconds * 1e6:.1f} us as codes")
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
    gate = "silu" if (outputs, columns) == _GATED else "none"
    if form == "bf16":
        return DenseCase(rows, outputs, columns, torch.bfloat16, gate)
    if form in BYTES:
        return BytesCase(BYTES[form], rows, outputs, columns, False, torch.bfloat16, gate)
    group, scale = {"float4": (16, "e4m3"), "float8": (0, "half")}.get(form, (128, "half"))
    return CodesCase(form, rows, outputs, columns, group, torch.bfloat16, scale, gate=gate)
