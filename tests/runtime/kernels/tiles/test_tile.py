"""Which tile is looked up for which product."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.linear.packing import FORMATS
from smelt.runtime.kernels.tiles.tile import LinearShape, Tile, Tiles, file_name, read, text, tiles_of, tiles_of_target

FEW, MANY = Tile(64, 16, 256, 0, 4, 3, False), Tile(128, 128, 64, 1, 8, 4, True)
WIDE = Tile(64, 16, 128, 3, 4, 3, False)
SHAPE = LinearShape(1, 4096, 4096, 128, 4)
TILES = Tiles(
    "",
    TARGETS["sm_90"],
    {
        "linear": [(SHAPE, FEW), (replace(SHAPE, outputs=131072), WIDE), (replace(SHAPE, rows=512), MANY)],
        "linear/int3": [(SHAPE, WIDE)],
    },
)


def test_rows_count_most() -> None:
    assert TILES.find("linear", "int4", replace(SHAPE, rows=900, outputs=131072), 64) == MANY
    assert TILES.find("linear", "int4", replace(SHAPE, rows=2, outputs=131072), 64) == WIDE


def test_a_format_has_tiles_of_its_own() -> None:
    assert TILES.find("linear", "int3", replace(SHAPE, rows=512), 128) == WIDE


@pytest.mark.parametrize(("outputs", "expected"), [(1152, 128), (896, 128), (151936, 128), (4096, 256), (300, 128)])
def test_tiles_cover_the_outputs_that_a_weight_is_filled_up_to(outputs: int, expected: int) -> None:
    """Qwen2.5-0.5B's shapes, by tiles that were found for 4096 outputs."""
    wide = Tiles("", TARGETS["sm_90"], {"linear": [(SHAPE, replace(MANY, outputs=256))]})
    assert wide.find("linear", "int4", replace(SHAPE, outputs=outputs), 64).outputs == expected


def test_an_iteration_reads_at_least_what_is_unpacked_together_and_fits() -> None:
    found = TILES.find("linear", "int4", replace(SHAPE, rows=512, bits=3), 256)
    assert found.step == 256
    assert found.stages * 256 * (128 * 3 // 8 + 2 * found.rows) <= TARGETS["sm_90"].shared


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 100, 512, 5000])
def test_shipped_tiles_serve_every_format_at_any_size(target: object, rows: int) -> None:
    tiles = tiles_of_target(target)  # pyright: ignore[reportArgumentType]
    for form in FORMATS.values():
        for outputs, columns in ((128, 256), (4096, 14336), (128256, 4096)):
            tile = tiles.find(
                "linear_codes", form.name, LinearShape(rows, outputs, columns, 128, form.bits), form.block
            )
            assert 1 <= tile.split <= -(-columns // tile.step)
            assert tile.rows >= min(8, rows)
            assert tile.stages * tile.step * (tile.outputs * form.bits // 8 + 2 * tile.rows) <= tiles.target.shared


def test_small_products_are_split_until_the_device_is_full() -> None:
    tiles = tiles_of_target(TARGETS["sm_90"])
    tile = tiles.find("linear_codes", "int4", replace(SHAPE, rows=4), 64)
    programs = 4096 // tile.outputs * tile.split
    assert 0.75 * 4 * 132 <= programs <= 4 * 132
    wide = tiles.find("linear_codes", "int4", replace(SHAPE, outputs=128256), 64)
    assert wide.split == 1


# Outputs and columns of Llama-3-8B as the engine multiplies them: queries with keys and values, out, gate with inputs, down, head.
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("kernel", "form", "bits", "group"),
    [("linear_codes", "int4", 4, 128), ("linear_bytes", "int8", 8, 0), ("linear_dense", "half", 16, 0)],
)
def test_partial_sums_move_little_beside_the_weight(name: str, kernel: str, form: str, bits: int, group: int) -> None:
    """At most an eighth of its bytes; more only where otherwise units would have no program, and then one each at most."""
    tiles = tiles_of_target(TARGETS[name])
    units = tiles.target.units
    for outputs, columns in LLAMA:
        for rows in range(1, 65):
            tile = tiles.find(kernel, form, LinearShape(rows, outputs, columns, group or columns, bits), 64)
            programs = -(-outputs // tile.outputs) * -(-rows // tile.rows) * tile.split
            # Each part is float32, written by one program and read by another.
            moved = 0 if tile.split == 1 else tile.split * rows * outputs * 4 * 2
            assert moved <= outputs * columns * bits / 8 / 8 or programs <= units
            assert programs > units / 2


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("kernel", "form", "bits"), [("linear_codes", "int4", 4), ("linear_bytes", "int8", 8), ("linear_dense", "half", 16)]
)
def test_one_row_shares_columns_among_warps_where_they_divide(name: str, kernel: str, form: str, bits: int) -> None:
    """Then programs exchange no sums."""
    tiles = tiles_of_target(TARGETS[name])
    for outputs, columns in ((6144, 4096), (4096, 4096), (4096, 14336)):
        tile = tiles.find(kernel, form, LinearShape(1, outputs, columns, 128 if bits == 4 else columns, bits), 64)
        assert tile.slices == tile.warps > 1
        assert tile.split == 1
        assert outputs // tile.outputs >= 256  # one for each unit at least
    # Many outputs, which are programs enough (but not for linear_codes); and columns that are an odd number of times 256 or 64.
    others = ((4096, 173 * 64),) if kernel == "linear_codes" else ((28672, 4096), (4096, 43 * 256))
    for outputs, columns in others:
        shape = LinearShape(1, outputs, columns, 128 if bits == 4 else columns, bits)
        assert tiles.find(kernel, form, shape, 64).slices == 1
    if kernel == "linear_bytes":  # blocks of the weight have scales of their own
        assert tiles.find(kernel, form, LinearShape(1, 4096, 4096, 128, 8), 128).slices == 1


def test_many_rows_share_what_is_unpacked() -> None:
    tiles = tiles_of_target(TARGETS["sm_90"])
    assert tiles.find("linear_codes", "int4", replace(SHAPE, rows=512), 64).rows == 128
    assert tiles.find("linear_codes", "int4", replace(SHAPE, rows=1024), 64).rows == 256


def test_a_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / file_name("NVIDIA H100 80GB HBM3")
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    kept = replace(TILES, description="description", restore_rows=700)
    kept = replace(kept, entries={**TILES.entries, "sliced": [(SHAPE, replace(FEW, slices=8))]})
    path.write_text(text(kept, {"device": "x"}))
    assert read(path, TARGETS["sm_90"]) == kept
    assert json.loads(path.read_text())["measured"] == {"device": "x"}


@pytest.mark.parametrize(
    "broken", ["{", "{}", '{"description": "", "restore_rows": 0, "tiles": {"linear": [{"shape": {}, "tile": {}}]}}']
)
def test_a_broken_file_is_reported(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(broken)
    with pytest.raises(ValueError, match=r"x\.json: not valid tiles"):
        read(path, TARGETS["sm_90"])


def test_the_interpreter_has_tiles() -> None:
    assert tiles_of(torch.device("cpu")).target.name == "sm_90"


def test_untuned_tiles_say_so() -> None:
    for target in TARGETS.values():
        assert "never measured" in tiles_of_target(target).description
