"""What tuning does around its timings, and that what it compiles ahead is what is launched."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from smelt.runtime.heads import Heads
from smelt.runtime.kernels import tune_attention
from smelt.runtime.kernels.attention_tiles import PromptTile, TokenTile
from smelt.runtime.kernels.launch import Launch, noted
from smelt.runtime.kernels.linear_codes import CodesCase
from smelt.runtime.kernels.precompile import identity
from smelt.runtime.kernels.targets import TARGETS, target_of
from smelt.runtime.kernels.tile import Shape, Tile, Tiles, read, text, tiles_of_target
from smelt.runtime.kernels.tune import Found, overlaid
from smelt.runtime.kernels.tune_attention import AttentionTuning
from smelt.runtime.kernels.tune_linears import LinearTuning, linears, pays_from
from smelt.runtime.kernels.workspace import Workspace

from .test_check import ENVIRONMENT

SHAPE, TILE = Shape(1, 4096, 4096, 128, 4), Tile(64, 16, 256, 0, 4, 3, False)
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
        ("linear_scaled", "mxfp4", 128, SHAPE),
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


def test_the_most_telling_shapes_come_first() -> None:
    found = linears(["int4", "bytes-int8", "bf16"])
    assert [one.case.rows for one in found[:12]] == [1] * 12
    assert len(set(found)) == len(found) == 2 * 4 * 8 + 4 * 5  # many rows of plain numbers are torch's


def test_one_compilation_serves_launches_that_differ_in_size_alone() -> None:
    target, tile = TARGETS["sm_90"], Tile(64, 16, 256, 2, 4, 3, False)
    one = identity(replace(CASE, tile=tile).launch(target))
    assert identity(replace(CASE, rows=7, outputs=14336, tile=replace(tile, split=5)).launch(target)) == one
    assert identity(replace(CASE, tile=replace(tile, split=1)).launch(target)) != one
    assert identity(replace(CASE, tile=replace(tile, stages=4)).launch(target)) != one
    assert identity(replace(CASE, dtype=torch.float16, tile=tile).launch(target)) != one


SPECIALIZE = """
import torch
from smelt.runtime.kernels.registry import KERNELS
from smelt.runtime.kernels.targets import TARGETS
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
