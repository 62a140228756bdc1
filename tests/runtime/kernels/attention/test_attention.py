"""What attention does with codes of a cache: their PTX, scales far apart, and how a short context is cut."""

from __future__ import annotations

import re
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
from torch import Tensor

from ..interpreter import interpreted

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 64, 64**-0.5, None, None)


def execute(text: str, outputs: int, words: Tensor) -> list[Tensor]:
    """Run a routine on 32-bit words, by the PTX manual's meaning of each instruction; float64 of each output's halves."""
    names = {f"${outputs}": words}

    def value(operand: str) -> Tensor:
        return names[operand] if operand in names else torch.tensor(int(operand, 0))

    for line in text.splitlines():
        found = re.fullmatch(r"([\w.]+) ([^;]+);", line.strip())
        if found is None or found[1].startswith(".reg"):
            continue
        operation, (to, *operands) = found[1], [part.strip() for part in found[2].split(",")]
        given = [value(operand) for operand in operands]
        if operation == "mov.b32":
            names[to] = given[0]
        elif operation == "xor.b32":
            names[to] = given[0] ^ given[1]
        elif operation == "shr.b32":
            names[to] = given[0] >> given[1]
        elif operation == "lop3.b32":
            assert int(given[3]) == 0xEA  # a & b | c
            names[to] = given[0] & given[1] | given[2]
        elif operation == "prmt.b32":
            both = [part >> 8 * i & 0xFF for part in given[:2] for i in range(4)]
            both = [part.expand_as(words) for part in both]
            picked = [both[int(given[2]) >> 4 * i & 7] << 8 * i for i in range(4)]
            names[to] = picked[0] | picked[1] | picked[2] | picked[3]
        elif operation == "sub.f16x2":
            low, high = ((_half(given[0] >> s) - _half(given[1] >> s)).view(torch.int16).long() for s in (0, 16))
            names[to] = low & 0xFFFF | (high & 0xFFFF) << 16
        else:
            raise AssertionError(f"unknown instruction {line}")
    return [_half(names[f"${i}"] >> shift).double() for i in range(outputs) for shift in (0, 16)]


def _half(bits: Tensor) -> Tensor:
    bits = bits & 0xFFFF
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.float16)


def test_bytes_become_halves_in_their_order() -> None:
    words = torch.cat([torch.arange(256) * 0x01010101, torch.randint(1 << 32, (1 << 16,))])
    for i, got in enumerate(execute(cached._BYTES_PTX.value, 2, words)):
        assert torch.equal(got, (words >> 8 * i & 0xFF).to(torch.uint8).view(torch.int8).double())


def test_nibbles_become_halves_in_their_order() -> None:
    words = torch.cat([torch.arange(256) * 0x01010101, torch.randint(1 << 32, (1 << 16,))])
    for i, got in enumerate(execute(cached._NIBBLES_PTX.value, 4, words)):
        assert torch.equal(got, ((words >> 4 * i & 15) - 8).double())


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


@interpreted
@pytest.mark.parametrize(("positions", "parts"), [(512, 4), (100, 4), (2048, 16)])
def test_a_short_context_is_cut_too(positions: int, parts: int) -> None:
    """512 positions are 32 tiles here, and four parts of eight tiles; 100 are 7 tiles, and four parts of two."""
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
    assert isinstance(sums, Tensor)
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
