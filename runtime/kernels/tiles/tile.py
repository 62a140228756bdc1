"""Tiles of launches: shipped in a file per device, looked up by the nearest shape, never tuned during a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...heads import Heads
from ..base.targets import Target, target_of
from .attention_tiles import PromptTile, TokenTile, prompt_tile, token_tile

FILLED = 128  # a packed weight's outputs are filled up to a multiple of this, so that no tile needs a mask

SHIPPED = Path(__file__).parent / "configs"
# Of a weight's bytes, what partial sums may move.
_SHARE = 1 / 8
_MOST_PARTS = 16  # the last program adds them one after another
_WAVES = 8  # programs per unit; with more, each has too few iterations to keep loads in flight


@dataclass(frozen=True)
class Tile:
    """The tile of a launch.

    Attributes:
        outputs: of the weight's rows, a program's.
        rows: of the inputs.
        step: columns that an iteration reads.
        split: programs that share a tile's columns (split-K); 0 to fill the device.
        warps: of a program.
        stages: iterations whose loads are in flight, and the one that is computed; of codes with slices one iteration is, or two from 2 on.
        fold: multiply weights by their scales, instead of each group's sum.
        slices: warps, or groups of them, that share out an iteration's columns (sliced-K in CUTLASS's terms): each reads ``step``.
    """

    outputs: int
    rows: int
    step: int
    split: int
    warps: int
    stages: int
    fold: bool
    slices: int = 1


@dataclass(frozen=True)
class LinearShape:
    """What a tile is looked up for.

    Attributes:
        rows: of the inputs.
        outputs, columns: of the weight.
        group: columns that share a scale.
        bits: of a weight.
    """

    rows: int
    outputs: int
    columns: int
    group: int
    bits: int


@dataclass(frozen=True)
class AttentionShape:
    """What a tile of attention is looked up for, of queries in 16 bits.

    Attributes:
        kind: of the cache, as :class:`LayerCache` calls it.
        size: of a head.
        group: query heads that share a key.
    """

    kind: str
    size: int
    group: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one device.

    Attributes:
        description: their device and whether they were measured, for messages.
        target: the device.
        entries: for each kernel and format, shapes with their tiles.
        restore_rows: the number of rows from which weights are restored for a dense product; 0 for never.
        tokens, prompts: of attention, where they were measured.
    """

    description: str
    target: Target
    entries: dict[str, list[tuple[LinearShape, Tile]]]
    restore_rows: int = 0
    tokens: dict[AttentionShape, TokenTile] = field(default_factory=dict)
    prompts: dict[AttentionShape, PromptTile] = field(default_factory=dict)

    def of_tokens(self, heads: Heads, dtype: torch.dtype, kind: str) -> TokenTile:
        """The tile for attention of single tokens: the measured one, otherwise by the rule for the kind of device."""
        rule = token_tile(self.target, heads, dtype, kind)
        return rule if dtype.itemsize != 2 else self.tokens.get(AttentionShape(kind, heads.size, heads.group), rule)

    def of_prompts(self, heads: Heads, dtype: torch.dtype, kind: str) -> PromptTile:
        """The same for prompts."""
        rule = prompt_tile(self.target, heads, dtype, kind)
        return rule if dtype.itemsize != 2 else self.prompts.get(AttentionShape(kind, heads.size, heads.group), rule)

    def find(self, kernel: str, form: str, shape: LinearShape, block: int, row_tiles: int = 0) -> Tile:
        """The tile of the nearest shape, made to fit the device's shared memory.

        Rows matter most: a tile with fewer rows than the step reads the weight several times, one with
        more wastes work.

        Args:
            kernel, form: what it is for.
            shape: of the product.
            block: columns that the format unpacks together, the fewest that an iteration can read.
            row_tiles: how many tiles of rows there are, if not as many as hold the shape's rows.

        Raises:
            KeyError: there is none for this kernel.
        """
        form = {"nested8": "int8", "upper4": "int4"}.get(form, form)  # as many bytes, read alike
        known = self.entries.get(f"{kernel}/{form}") or self.entries[kernel]
        known = [entry for entry in known if divides(entry[1], shape.columns, block)]
        tile = min(known, key=lambda entry: _distance(entry[0], shape))[1]
        tile = replace(tile, step=max(tile.step, block))
        while (
            -(-shape.outputs // FILLED) * FILLED % tile.outputs
        ):  # it was found for outputs that are a multiple of more
            tile = replace(tile, outputs=tile.outputs // 2)
        while shared(tile, shape) > self.target.shared and (smaller := _smaller(tile, block)) != tile:
            tile = smaller
        if not self.target.splits:
            return replace(tile, split=1)
        return tile if tile.split else filling(tile, shape, self.target.units, row_tiles)


@cache
def tiles_of(device: torch.device) -> Tiles:
    """The device's own tiles if it was measured, otherwise those of its kind.

    Raises:
        ValueError: no kernel supports it.
    """
    target = target_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    path = SHIPPED / file_name(name)
    return read(path if name and path.exists() else SHIPPED / f"{target.name}.json", target)


def tiles_of_target(target: Target) -> Tiles:
    """The tiles of a kind of devices, for compiling without one."""
    return read(SHIPPED / f"{target.name}.json", target)


def file_name(device: str) -> str:
    """The path of a device's tuned tiles."""
    return "-".join("".join(c if c.isalnum() else " " for c in device).split()).lower() + ".json"


def read(path: Path, target: Target) -> Tiles:
    """Tiles from a file.

    Raises:
        ValueError: it is not a file of tiles.
    """
    try:
        found = json.loads(path.read_text())
        entries = {
            kernel: [(LinearShape(**entry["shape"]), Tile(**entry["tile"])) for entry in listed]
            for kernel, listed in found["tiles"].items()
        }
        attention = found.get("attention", {})
        tokens = {AttentionShape(**e["shape"]): TokenTile(**e["tile"]) for e in attention.get("attend_tokens", [])}
        prompts = {AttentionShape(**e["shape"]): PromptTile(**e["tile"]) for e in attention.get("attend_prompts", [])}
        return Tiles(found["description"], target, entries, int(found["restore_rows"]), tokens, prompts)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid tiles ({error})") from error


def text(tiles: Tiles, facts: dict[str, Any] | None = None) -> str:
    """A file's text; ``facts`` says how they were measured."""

    def listed(entries: Iterable[tuple[Any, Any]]) -> list[dict[str, Any]]:
        def fields(tile: Any) -> dict[str, Any]:
            return {name: value for name, value in vars(tile).items() if (name, value) != ("slices", 1)}

        return [{"shape": vars(shape), "tile": fields(tile)} for shape, tile in entries]

    data: dict[str, Any] = {"description": tiles.description, "measured": facts, "restore_rows": tiles.restore_rows}
    data["tiles"] = {kernel: listed(entries) for kernel, entries in tiles.entries.items()}
    attention = {"attend_tokens": tiles.tokens, "attend_prompts": tiles.prompts}
    measured = {kernel: listed(found.items()) for kernel, found in attention.items() if found}
    lines = json.dumps(data | ({"attention": measured} if measured else {}), indent=1).splitlines()
    # One line per tile keeps a file of hundreds readable.
    return _on_one_line(lines) + "\n"


def _on_one_line(lines: list[str]) -> str:
    kept, entry = [], None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if depth == 3 and line.strip() == "{":
            entry = line
        elif entry is not None:
            entry += line.strip() + (" " if line.rstrip().endswith((",", ":")) else "")
            if depth == 3:
                kept.append(entry)
                entry = None
        else:
            kept.append(line)
    return "\n".join(line.rstrip() for line in kept)


def _distance(known: LinearShape, wanted: LinearShape) -> float:
    def apart(a: int, b: int) -> float:
        return abs(math.log2(max(a, 1) / max(b, 1)))

    rows = apart(known.rows, wanted.rows)
    return (
        8 * rows
        + apart(known.outputs, wanted.outputs)
        + apart(known.columns, wanted.columns)
        + 0.5 * apart(known.group, wanted.group)
        + 0.5 * apart(known.bits, wanted.bits)
    )


def _smaller(tile: Tile, block: int) -> Tile:
    """The tile with the least harmful change that takes less shared memory."""
    if tile.stages > 2:
        return replace(tile, stages=tile.stages - 1)
    if tile.rows > 16:
        return replace(tile, rows=tile.rows // 2)
    return replace(tile, step=max(tile.step // 2, block))


def shared(tile: Tile, shape: LinearShape) -> int:
    """A program's approximate shared memory: the loads of its stages."""
    return tile.stages * tile.step * tile.slices * (tile.outputs * shape.bits // 8 + 2 * tile.rows)


def divides(tile: Tile, columns: int, block: int) -> bool:
    """Whether slices, if there are several, all end where the columns do."""
    return tile.slices == 1 or columns % (max(tile.step, block) * tile.slices) == 0


def filling(tile: Tile, shape: LinearShape, units: int, row_tiles: int = 0) -> Tile:
    """The tile with its columns split among enough programs to fill a device with this many units."""
    row_tiles = row_tiles or -(-shape.rows // tile.rows)
    tiles = row_tiles * -(-shape.outputs // tile.outputs)
    steps = -(-shape.columns // (tile.step * tile.slices))
    return replace(tile, split=_split(tiles, steps, units, min(steps, most_parts(shape, tiles, units))))


def most_parts(shape: LinearShape, tiles: int, units: int) -> int:
    """How many programs may share a tile's columns, so that partial sums move little beside the weight.

    Each program leaves a float32 for each row and output, which is written and read again: 8 x rows x outputs x split bytes,
    beside the weight's outputs x columns x bits / 8. So the share is 64 x rows x split / (columns x bits): for 4 bits and 4096
    columns split / 256 of a row's, and a split of 16 moved as much as the weight at 16 rows, and four times as much at 64.

    An eighth is allowed. Beyond that there are only as many programs as the device has units, rounded down: a unit without
    one reads nothing, which costs more than the sums, most of which stay in the second-level cache.
    """
    by_bytes = int(_SHARE * shape.columns * shape.bits / (64 * shape.rows))
    return max(1, min(_MOST_PARTS, _WAVES * units // tiles, max(by_bytes, units // tiles)))


def _split(tiles: int, steps: int, units: int, most: int) -> int:
    """How many programs should share a tile, so that no unit waits long for others: the waves and steps that are full."""
    together = 4 * units  # programs on a unit at once, enough for the loads in flight that memory needs

    def filled(split: int) -> float:
        programs = tiles * split
        waves = programs / (-(-programs // together) * together)
        return waves * steps / (split * -(-steps // split))

    all_filled = [filled(split) for split in range(1, most + 1)]
    # Each part more is another sum to write and to read.
    return next(split for split, share in enumerate(all_filled, 1) if share >= 0.85 * max(all_filled))
