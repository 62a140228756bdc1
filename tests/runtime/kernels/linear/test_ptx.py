"""The PTX of unpacking, executed instruction by instruction on all 65,536 words, against what the codes mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from smelt.runtime.kernels.linear import ptx
from torch import Tensor

from ..ptx_emulator import execute, halves

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
WORDS = torch.arange(1 << 16)


def numbers(text: str, outputs: int, inputs: list[Tensor], half: torch.dtype) -> list[Tensor]:
    """What a routine makes of 16-bit words, as float64.

    Each register has the word itself in its lower half and, in the upper half, a word that is another:
    what leaks from one into the other shows.
    """
    registers = execute(text, outputs, [words | words.flip(0) << 16 for words in inputs], half)
    for register in registers:
        # The upper halves hold the same results in the other order.
        assert torch.equal(register & 0xFFFF, (register >> 16).flip(0))
    return [halves(register, half)[0] for register in registers]


def _codes(bits: int) -> list[Tensor]:
    return [(WORDS >> place & (1 << bits) - 1) - (1 << bits - 1) for place in range(0, 16, bits)]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@pytest.mark.parametrize("half", [ptx.FLOAT16, ptx.BFLOAT16], ids=["float16", "bfloat16"])
class TestUnpacking:
    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_integers(self, half: ptx.Half, bits: int) -> None:
        found = numbers(ptx.integers(bits, half), 16 // bits, [WORDS], TYPES[half.name])
        for got, code in zip(found, _codes(bits), strict=True):
            assert torch.equal(got, code.double())

    def test_planes(self, half: ptx.Half) -> None:
        lower = WORDS[torch.randperm(1 << 16)]
        found = numbers(ptx.nested(half), 4, [WORDS, lower], TYPES[half.name])
        middles = numbers(ptx.upper(half), 4, [WORDS], TYPES[half.name])
        for place, got, middle in zip(range(0, 16, 4), found, middles, strict=True):
            first = 16 * (WORDS >> place & 15) - 128
            assert torch.equal(got, (first + (lower >> place & 15)).double())
            assert torch.equal(middle, (first + 8).double())

    @pytest.mark.parametrize("second", [False, True])
    def test_three_bits(self, half: ptx.Half, second: bool) -> None:
        high = WORDS[torch.randperm(1 << 16)]
        # The emulator's upper halves are its lower ones turned around.
        found = numbers(ptx.three_bits(half, second), 8, [WORDS, high], TYPES[half.name])
        for i, got in enumerate(found):
            bit = (2 * i + 2) % 16 + second
            assert torch.equal(got, ((WORDS >> 2 * i & 3) + 4 * (high >> bit & 1) - 4).double())

    def test_four_bit_floats(self, half: ptx.Half) -> None:
        found = numbers(ptx.floats4(half), 4, [WORDS], TYPES[half.name])
        for got, (sign, rest) in zip(found, ptx.FLOAT4_PLACES, strict=True):
            want = E2M1[WORDS >> rest & 7] * (1 - 2 * (WORDS >> sign & 1))
            assert torch.equal(got, want)

    def test_the_bits_of_four_bit_floats_share_no_place(self, half: ptx.Half) -> None:
        places = [place for sign, rest in ptx.FLOAT4_PLACES for place in (sign, rest, rest + 1, rest + 2)]
        assert sorted(places) == list(range(16))

    def test_eight_bit_floats(self, half: ptx.Half) -> None:
        found = numbers(ptx.floats8(half), 2, [WORDS], TYPES[half.name])
        for place, got in enumerate(found):
            codes = WORDS >> 8 * place & 0xFF
            want = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
            known = ~want.isnan()
            assert torch.equal(got[known], want[known])

    @pytest.mark.parametrize("second", [False, True])
    def test_two_of_four(self, half: ptx.Half, second: bool) -> None:
        pairs = [1 << i | 1 << j for j in range(4) for i in range(j)]
        places = torch.zeros(1 << 16, dtype=torch.int64)
        for nibble in range(4):
            places |= torch.tensor(pairs)[torch.randint(6, (1 << 16,))] << 4 * nibble
        found = numbers(ptx.sparse4(half, second), 8, [WORDS, places], TYPES[half.name])
        for group in range(2):
            first, last = ((WORDS >> 8 * group + 4 * i & 15) - 8 for i in range(2))
            mask = places >> 8 * second + 4 * group & 15
            seen = torch.zeros_like(mask)
            for place in range(4):
                here = mask >> place & 1
                want = torch.where(here == 1, torch.where(seen == 0, first, last), 0)
                seen = seen + here
                assert torch.equal(found[4 * group + place], want.double())

    @pytest.mark.parametrize(("routine", "operation"), [(ptx.minus, torch.sub), (ptx.times, torch.mul)])
    def test_pairs(self, half: ptx.Half, routine: Callable[[ptx.Half], str], operation: Callable[..., Tensor]) -> None:
        dtype = TYPES[half.name]
        a = torch.randint(-128, 128, (1 << 16,)).to(dtype)
        b = torch.randint(-7, 8, (1 << 16,)).to(dtype)
        bits = [part.view(torch.int16).long() & 0xFFFF for part in (a, b)]
        (got,) = numbers(routine(half), 1, bits, dtype)
        assert torch.equal(got, operation(a.double(), b.double()).to(dtype).double())
