"""What attention does with codes of a cache: their PTX, scales far apart, and how a short context is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.attention.attend_prompts import attend_prompts, attention_constants, work_of
from smelt.runtime.kernels.attention.attend_rows import attend_rows
from smelt.runtime.kernels.attention.attend_tokens import attend_tokens, launches
from smelt.runtime.kernels.attention.case import AttentionCase, reference
from smelt.runtime.kernels.attention.flash import Runs
from smelt.runtime.kernels.base.targets import TARGETS, target_of
from smelt.runtime.kernels.base.workspace import Workspace
from smelt.runtime.kernels.rows import cached
from smelt.runtime.kernels.tiles.attention_tiles import PromptTile, TokenTile, token_tile

from ..interpreter import interpreted
from ..ptx_emulator import execute, halves

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 64, 64**-0.5, None, None)


def test_bytes_become_halves_in_their_order() -> None:
    words = torch.cat([torch.arange(256) * 0x01010101, torch.randint(1 << 32, (1 << 16,))])
    found = [got for register in execute(cached._BYTES_PTX.value, 2, [words]) for got in halves(register)]
    for i, got in enumerate(found):
        assert torch.equal(got, (words >> 8 * i & 0xFF).to(torch.uint8).view(torch.int8).double())


def test_nibbles_become_halves_in_their_order() -> None:
    words = torch.cat([torch.arange(256) * 0x01010101, torch.randint(1 << 32, (1 << 16,))])
    found = [got for register in execute(cached._NIBBLES_PTX.value, 4, [words]) for got in halves(register)]
    for i, got in enumerate(found):
        assert torch.equal(got, ((words >> 4 * i & 15) - 8).double())


@pytest.mark.few(1)
@interpreted
@pytest.mark.parametrize(("kind", "cap"), [("int8", None), ("float8", 5.0), ("int4", None)])
def test_scales_of_values_may_be_far_apart(kind: str, cap: float | None) -> None:
    """From rows of zeros to values that float16 could not hold."""
    case = AttentionCase(replace(HEADS, cap=cap), kind, torch.bfloat16, 16, ((1, 70), (21, 50)))
    draw = torch.Generator().manual_seed(3)
    cache, tables = case.random_cache(CPU, draw)
    assert cache.value_scales is not None
    exponents = torch.randint(-20, 5, cache.value_scales.shape, generator=draw)
    cache.value_scales.copy_(10.0**exponents * (exponents > -20))
    rows, counts, stops = (torch.tensor(each, dtype=torch.int32) for each in ((0, 1), (1, 21), (70, 50)))
    runs = Runs(rows, counts, stops, tables)
    queries = torch.randn(22, HEADS.queries * HEADS.size, generator=draw).bfloat16()
    expected = reference(queries, case.heads, cache, runs)
    tile = PromptTile(16, 16, 4, 1)
    work = torch.tensor(work_of([1, 21], [70, 50], tile.tokens(2)), dtype=torch.int32)
    target = replace(target_of(CPU), units=3 * HEADS.shared)
    for attend in (attend_prompts, attend_rows):
        found = torch.zeros(queries.shape, dtype=torch.float32)
        attend(queries, case.heads, cache, runs, work, found, tile)
        attend_tokens(queries, case.heads, cache, runs, found, tile=TokenTile(16, 1, 4, 1, 1), target=target)
        for got, want in zip(found.double().view(22, 4, 64), expected.view(22, 4, 64), strict=True):
            # Each head of each token by itself: sizes differ a lot.
            assert ((got - want).norm(dim=-1) <= 2e-3 * want.norm(dim=-1)).all()


@pytest.mark.few(1)
@interpreted
@pytest.mark.parametrize(("positions", "parts"), [(512, 8), (100, 7), (2048, 16)])
def test_a_short_context_is_cut_too(positions: int, parts: int) -> None:
    """512 positions are 32 tiles here, and eight parts of four; 100 are seven parts of a tile."""
    case = AttentionCase(HEADS, "plain", torch.float32, 16, ((1, positions),))
    draw = torch.Generator().manual_seed(3)
    cache, tables = case.random_cache(CPU, draw)
    one = torch.ones(1, dtype=torch.int32)
    runs = Runs(0 * one, one, positions * one, tables)
    x, space = torch.randn(1, 256, generator=draw), Workspace(CPU)
    out, target = torch.empty_like(x), replace(target_of(CPU), units=64)
    tile = TokenTile(16, 8, 4, 1, 1)
    (launch,) = launches(x, HEADS, cache, runs, out, tile, target, space)
    sums = launch.arguments["sums"]
    assert isinstance(sums, torch.Tensor)
    sums.fill_(float("nan"))
    launch.run()
    # A part leaves the sums of two queries for each of two keys, with their highest score and total.
    assert int(sums.isfinite().sum()) == parts * 2 * 2 * (64 + 2)
    torch.testing.assert_close(out.double(), reference(x, HEADS, cache, runs), rtol=1e-5, atol=1e-6)


def test_what_32_bits_do_not_number_is_refused() -> None:
    heads = Heads(1, 1, 16, 0.25, None, None)
    cache = cached.layer_cache(1 << 27, 1, 16, 16, "int8", torch.float16, "meta")
    with pytest.raises(ValueError, match="more than 2 billion rows"):
        attention_constants(torch.float16, heads, cache)
    with pytest.raises(ValueError, match="a positive score scale"):
        attention_constants(torch.float16, replace(heads, scale=-1.0), cache)


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
def test_a_rule_leaves_four_tiles_of_512_positions(kind: str) -> None:
    """Then eight key-value heads have 32 programs for one sequence."""
    heads = Heads(32, 8, 128, 128**-0.5, None, None)
    assert 512 // token_tile(TARGETS["sm_90"], heads, torch.bfloat16, kind).positions >= 4
