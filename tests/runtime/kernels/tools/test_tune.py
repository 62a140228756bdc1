"""What tuning does around its timings, and that what it compiles ahead is what is launched."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.base.launch import Launch, noted
from smelt.runtime.kernels.base.precompile import identity
from smelt.runtime.kernels.base.targets import TARGETS, Target, target_of
from smelt.runtime.kernels.base.workspace import Workspace
from smelt.runtime.kernels.linear.linear_codes import CodesCase
from smelt.runtime.kernels.tiles.attention_tiles import PromptTile, TokenTile
from smelt.runtime.kernels.tiles.tile import LinearShape, Tile, Tiles, read, text, tiles_of_target
from smelt.runtime.kernels.tools import tune, tune_attention, tune_linears
from smelt.runtime.kernels.tools.tune import Found, overlaid
from smelt.runtime.kernels.tools.tune_attention import AttentionTuning
from smelt.runtime.kernels.tools.tune_linears import LinearTuning, linears, pays_from

from .test_check import ENVIRONMENT

SHAPE, TILE = LinearShape(1, 4096, 4096, 128, 4), Tile(64, 16, 256, 0, 4, 3, False)
FASTER = replace(TILE, outputs=128)
CASE = CodesCase("int4", 1, 4096, 4096, 128, torch.bfloat16)


FOUND = Found(LinearTuning(CASE), FASTER, 1e-6, 3)


def test_what_was_not_tuned_stays() -> None:
    before = tiles_of_target(TARGETS["sm_90"])
    after = overlaid(before, [FOUND])
    assert after.find("linear_codes", "int4", SHAPE, 64).outputs == 128
    # Other rows, formats and kernels have the tiles that they had.
    many = replace(SHAPE, rows=512)
    for kernel, form, block, shape in (
        ("linear_codes", "int4", 64, many),
        ("linear_codes", "int3", 256, SHAPE),
        ("linear_codes", "int8", 64, SHAPE),
        ("linear_bytes", "int8", 128, SHAPE),
    ):
        assert after.find(kernel, form, shape, block) == before.find(kernel, form, shape, block)


def test_a_shape_tuned_again_is_replaced() -> None:
    before = Tiles("", TARGETS["sm_90"], {"linear_codes/int4": [(SHAPE, TILE)]})
    assert overlaid(before, [FOUND]).entries == {"linear_codes/int4": [(SHAPE, FASTER)]}


def test_tuned_attention_is_read_again_and_serves_its_own_kind_alone(tmp_path: Path) -> None:
    heads, other = tune_attention.HEADS
    tokens, prompts = TokenTile(32, 2, 8, 3, 5), PromptTile(64, 16, 8, 3)
    found = [
        Found(AttentionTuning(heads, "int8", several), tile, 1e-6, 3)
        for several, tile in ((False, tokens), (True, prompts))
    ]
    before = tiles_of_target(TARGETS["sm_90"])
    path = tmp_path / "tiles.json"
    path.write_text(text(overlaid(before, found)))
    after = read(path, before.target)
    assert after.entries == before.entries
    half, full = torch.bfloat16, torch.float32
    assert after.of_tokens(heads, half, "int8") == tokens
    assert after.of_prompts(replace(heads, window=512), torch.float16, "int8") == prompts
    for case in ((heads, half, "plain"), (other, half, "int8"), (heads, full, "int8")):
        assert after.of_tokens(*case) == before.of_tokens(*case)
        assert after.of_prompts(*case) == before.of_prompts(*case)


@pytest.mark.parametrize("how", ["scaled", "not written"])
def test_a_tile_of_attention_that_computes_something_else_is_not_taken(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls write to the same memory."""
    for name, value in (("_SEQUENCES", 1), ("_CONTEXT", 64), ("_PROMPT", 32)):
        monkeypatch.setattr(tune_attention, name, value)
    computed = tune_attention.attend_tokens.attend_tokens

    def attend(*args: Any, tile: TokenTile) -> Any:
        if tile.warps == 8 and how == "not written":
            return args[4]
        out = computed(*args, tile=tile)
        return out.mul_(-3) if tile.warps == 8 else out

    monkeypatch.setattr(tune_attention.attend_tokens, "attend_tokens", attend)
    monkeypatch.setattr(tune, "seconds", lambda calls, replays: 1.0)
    one = AttentionTuning(Heads(2, 1, 64, 0.125, None, None), "plain", False)
    search, said = tune._TileSearch(one, torch.device("cpu"), None), list[str]()  # pyright: ignore[reportArgumentType]
    right, wrong = TokenTile(16, 1, 4, 1, 1), TokenTile(16, 1, 8, 1, 1)
    assert search.take([right, wrong, replace(right, least=2)], said.append)
    assert [taken is not None for taken in search._tried.values()] == [True, False, True]
    assert len(said) == 1
    assert "gives wrong results" in said[0]


@pytest.mark.parametrize("several", [False, True], ids=["tokens", "prompts"])
def test_attention_compiles_ahead_what_it_times(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And candidates compute the same."""
    for name, value in (("_SEQUENCES", 2), ("_CONTEXT", 64), ("_PROMPT", 48)):
        monkeypatch.setattr(tune_attention, name, value)
    one, device = AttentionTuning(Heads(4, 2, 32, 0.2, None, None), "int8", several), torch.device("cpu")
    call = one.calls(device)[0]
    tiles = [one.shipped(tiles_of_target(TARGETS["sm_90"])), one.candidates(TARGETS["sm_90"])[0]]
    found = []
    for tile in tiles:
        launched = list[Launch]()
        with noted(launched.append):
            call(tile)
        assert [identity(x) for x in launched] == [identity(x) for x in one.launches(tile, target_of(device))]
        found.append(call(tile).float())
    assert bool(found[0].isfinite().all())
    assert (found[0] - found[1]).norm() <= 1e-2 * found[0].norm()


@pytest.mark.parametrize(
    ("codes", "restored", "rows"),
    [
        ({128: 1.0, 512: 2.0, 2048: 9.0}, {128: 2.0, 512: 1.9, 2048: 5.0}, 512),
        ({128: 1.0, 512: 2.0, 2048: 4.0}, {128: 0.5, 512: 3.0, 2048: 3.0}, 2048),  # a lucky small one does not count
        ({512: 1.0, 2048: 1.0}, {512: 2.0, 2048: 2.0}, 0),
        ({}, {}, None),
    ],
)
def test_restoring_pays_where_it_is_faster_from_there_on(
    codes: dict[int, float], restored: dict[int, float], rows: int | None
) -> None:
    assert pays_from(codes, restored) == rows


def test_the_most_important_shapes_come_first() -> None:
    found = linears(["int4", "bytes-int8", "bf16"])
    assert [one.case.rows for one in found[:18]] == [1] * 18
    assert len(set(found)) == len(found) == 2 * 6 * 8 + 6 * 5  # many rows of plain numbers are torch's
    # As the engine multiplies them: the gate's product belongs to the launch.
    assert {one.case.gate for one in found if one.case.outputs == 28672} == {"silu"}


def _space(rows: int, form: str = "int4", outputs: int = 4096) -> list[Tile]:
    """All that a search tries that stays at the shipped tile."""
    target = TARGETS["sm_90"]
    one = linears([form], [(outputs, 4096)], [rows])[0]
    best = one.shipped(tiles_of_target(target))
    return [tile for turn in range(one.rounds) for tile in one.around(best, turn, target)]


@pytest.mark.parametrize("form", ["int4", "int8", "bytes-int8", "bf16"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_every_candidate_fits_and_has_a_program(form: str, rows: int) -> None:
    bits = {"int4": 4, "bf16": 16}.get(form, 8)
    for outputs in (4096, 128256):
        for tile in _space(rows, form, outputs):
            assert tile.split >= 1
            taken = tile.stages * tile.step * tile.slices * (tile.outputs * bits // 8 + 2 * tile.rows)
            assert taken <= TARGETS["sm_90"].shared
            assert 4096 % (tile.step * tile.slices) == 0
            assert outputs % tile.outputs == 0


def test_few_rows_are_tried_with_small_programs_and_many() -> None:
    space = _space(1)
    assert {(64, 4), (32, 2), (16, 1), (128, 8)} <= {(tile.outputs, tile.warps) for tile in space}
    # Slices' weights are loaded one or two iterations before, in registers.
    assert {tile.stages for tile in space if tile.slices > 1} == {1, 2}
    assert {1, 2, 3, 4, 5, 6} <= {tile.stages for tile in _space(1, "bf16")}
    assert {128, 256, 512} <= {tile.step for tile in space}
    assert (16, 1, 1, 32) in {(tile.outputs, tile.warps, tile.stages, tile.split) for tile in space}
    assert {tile.rows for tile in space} == {8, 16}
    assert {(tile.outputs, tile.slices) for tile in space} >= {(16, 8), (16, 4), (32, 4)}
    # The last round keeps as many programs as the best has.
    again = linears(["int4"], [(4096, 4096)], [1])[0].around(Tile(64, 8, 256, 8, 4, 3, False), 3, TARGETS["sm_90"])
    assert {tile.outputs / tile.split for tile in again} == {64 / 8}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", ["int4", "bytes-int8", "bytes-e4m3", "bf16"])
@pytest.mark.parametrize("tile", [Tile(64, 16, 128, 2, 4, 3, False), Tile(16, 8, 128, 1, 4, 3, False, 4)], ids=str)
def test_linears_compile_ahead_what_they_time(form: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_linears, "copies_needed", lambda *_: 1)
    device = torch.device("cpu")
    one = linears([form], [(80, 1024)], [3])[0]
    launched = list[Launch]()
    calls = one.calls(device)  # rounds the inputs of 8-bit weights, which is not timed
    with noted(launched.append):
        calls[0](tile)
    assert [identity(x) for x in launched] == [identity(x) for x in one.launches(tile, TARGETS["sm_90"])]


@dataclass(frozen=True)
class _Made:
    """A shape whose time is how far a tile is from 20, found in two rounds; 7 leaves its outputs as they were."""

    name: str
    stage: str = "made"
    listed: str = "made"
    rounds: int = 2
    rows: int = 1

    def shipped(self, tiles: Tiles) -> int:
        return 10

    def around(self, best: int, turn: int, target: Target) -> list[int]:
        return [best + 5, 7, best - 1] if turn == 0 else [best + 7, best + 4]

    def launches(self, tile: int, target: Target) -> list[Launch]:
        return []

    def calls(self, device: torch.device) -> list[Any]:
        return [lambda tile: torch.empty(3) if tile == 7 else torch.ones(3)]

    def kept(self, tiles: Tiles, tile: int) -> Tiles:
        return tiles


def test_a_search_goes_on_around_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, messages, work = list[int](), list[str](), [_Made("a"), _Made("b")]

    def seconds(calls: list[Any], replays: int) -> float:
        tile = calls[0].__defaults__[-1]
        timed.append(tile)
        return abs(20 - tile)

    monkeypatch.setattr(tune, "seconds", seconds)
    monkeypatch.setattr(tune, "precompile", lambda launches, log: None)
    found = list(tune.search(work, torch.device("cpu"), 60, messages.append))  # pyright: ignore[reportArgumentType]
    assert [(one.of.name, one.tile, one.finished) for one in found] == [
        ("a", 15, False),
        ("b", 15, False),
        ("a", 19, True),
        ("b", 19, True),
    ]
    assert timed == [10, 15, 9] * 2 + [22, 19] * 2  # none twice
    assert sum("gives wrong results" in line for line in messages) == 2
    assert list(tune.search(work, torch.device("cpu"), -1, messages.append)) == []  # pyright: ignore[reportArgumentType]


def test_what_is_finished_is_known_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "card")
    monkeypatch.setattr(tune, "target_of", lambda _: TARGETS["sm_90"])
    monkeypatch.setattr(tune, "tiles_of", lambda _: tiles_of_target(target_of(device)))
    path, many = tmp_path / "card.json", LinearTuning(replace(CASE, rows=16))
    assert tune.finished(path) == set()
    tune.write([FOUND, Found(many, TILE, 1e-6, 3, finished=False)], None, path)
    assert tune.finished(path) == {CASE.name}
    # A second run adds to the first one's, wherever the file is.
    tune.write([Found(many, FASTER, 1e-6, 3)], 700, path)
    assert tune.finished(path) == {CASE.name, many.name}
    after = read(path, TARGETS["sm_90"])
    assert after.restore_rows == 700
    assert after.entries["linear_codes/int4"][-2:] == [(SHAPE, FASTER), (replace(SHAPE, rows=16), FASTER)]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another card")
    assert tune.finished(path) == set()


COMPILE = """
import sys
from dataclasses import replace
from smelt.runtime.kernels.tools.check import compile_build
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import tiles_of_target
from smelt.runtime.kernels.tools.tune_linears import linears

target = TARGETS["sm_90"]
for form in ("int4", "bytes-e4m3", "bytes-int8", "bf16"):
    for rows in (1, 16, 64, 512) if form != "bf16" else (1, 64):
        one = linears([form], [(28672, 4096)], [rows])[0]
        best = one.shipped(tiles_of_target(target))
        tiles = [tile for turn in (0, 1) for tile in one.around(best, turn, target)]
        for tile in tiles[:: int(sys.argv[1])]:
            # Spilling would only be slow, and is timed: what does not compile or fit would waste its place.
            found = compile_build("", replace(one.case, tile=tile).build(), target)
            print(form, rows, tile, found.registers, found.spills, "; ".join(found.faults), sep="|")
"""


@pytest.mark.slow
def test_candidates_compile_without_faults() -> None:
    command = [sys.executable, "-c", COMPILE, "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 50
    for line in lines:
        assert line.endswith("|"), line


def test_one_compilation_serves_launches_that_differ_in_size_alone() -> None:
    target, tile = TARGETS["sm_90"], Tile(64, 16, 256, 2, 4, 3, False)
    one = identity(replace(CASE, tile=tile).launch(target))
    assert identity(replace(CASE, rows=7, outputs=14336, tile=replace(tile, split=5)).launch(target)) == one
    assert identity(replace(CASE, tile=replace(tile, split=1)).launch(target)) != one
    assert identity(replace(CASE, tile=replace(tile, stages=4)).launch(target)) != one
    assert identity(replace(CASE, dtype=torch.float16, tile=tile).launch(target)) != one


SPECIALIZE = """
import torch
from smelt.runtime.kernels.tools.registry import KERNELS
from smelt.runtime.kernels.base.targets import TARGETS
from triton._C.libtriton import native_specialize_impl
from triton.compiler.compiler import make_backend
from triton.runtime.jit import MockTensor

target = TARGETS["sm_90"]
backend = type(make_backend(target.of_triton()))
for kernel in KERNELS:
    for case in kernel.cases:
        if case.launch is not None:
            for value in case.launch(target).arguments.values():
                known = MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value
                native_specialize_impl(backend, known, False, True, True)
"""


@pytest.mark.slow
def test_triton_takes_what_is_compiled_ahead() -> None:
    """As far as that goes without a driver: every argument can be specialized."""
    done = subprocess.run(
        [sys.executable, "-c", SPECIALIZE], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_workspace_keeps_what_it_outgrew() -> None:
    space = Workspace(torch.device("cpu"))
    first, _ = space.reserve(100, 3)
    again, counters = space.reserve(50, 2)
    assert again is first
    second, _ = space.reserve(1000, 3)
    assert second.numel() >= 1000
    assert space.reserve(10, 3)[1] is counters
    assert any(kept is first for kept in space._outgrown)
    assert not counters.any()
