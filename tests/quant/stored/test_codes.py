"""Each format of integer codes in both directions, against words written out from its definition."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from smelt.quant.grid import Grid
from smelt.quant.scheme import resolve
from smelt.quant.stored import awq, compressed_tensors, gptq
from smelt.quant.stored.codes import Codes
from smelt.quant.stored.quantized_weight import QuantizedWeight

from ...packing import awq_packed, packed

ROWS, COLUMNS, GROUP = 160, 128, 32


def codes_of(bits: int, *, symmetric: bool = False, ordered: bool = True, lowest: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(bits)
    half, groups = 2 ** (bits - 1), COLUMNS // GROUP
    values = torch.randint(-half, half, (ROWS, COLUMNS), generator=generator, dtype=torch.int8)
    scale = (torch.rand(ROWS, groups, generator=generator) + 0.1).half()
    zero = torch.randint(lowest - half, half, (ROWS, groups), generator=generator, dtype=torch.int8)
    places = (torch.arange(COLUMNS) // GROUP)[torch.randperm(COLUMNS, generator=generator)].int()
    return Codes(values, bits, scale, None if symmetric else zero, None if ordered else places)


def assert_equal(found: Codes | None, expected: Codes) -> None:
    assert found is not None
    assert found.bits == expected.bits
    for name in ("values", "scale", "zero", "places"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left is right is None or torch.equal(left, right), name


@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq(bits: int, version: int, symmetric: bool, ordered: bool) -> None:
    """Columns of ``qweight`` are numbers of ``bits`` bits; version 1 stores zero-points minus one."""
    codes = codes_of(bits, symmetric=symmetric, ordered=ordered, lowest=1 if version == 1 else 0)
    half, contiguous = 2 ** (bits - 1), (torch.arange(COLUMNS) // GROUP).int()
    zeros = torch.zeros(codes.scale.shape) if codes.zero is None else codes.zero
    middle = half - 1 if version == 1 else half
    expected = {
        "qweight": packed(codes.values.int() + half, bits).T,
        "qzeros": packed((zeros.int() + middle).T, bits),
        "scales": codes.scale.T,
        "g_idx": contiguous if codes.places is None else codes.places,
    }
    stored = {part: gptq.pack(codes, part, version) for part in gptq.PARTS}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[part], tensor) for part, tensor in expected.items())
    assert torch.equal(stored["qweight"], pack_to_int32(codes.values, bits).T), "compressed-tensors' own, transposed"
    assert stored["qweight"].is_contiguous()
    assert stored["qzeros"].is_contiguous()
    found = gptq.unpack(stored, bits, version)
    assert_equal(found, Codes(codes.values, bits, codes.scale, codes.zero, expected["g_idx"]))
    assert_equal(
        gptq.unpack({part: stored[part] for part in stored if part != "g_idx"}, bits, version),
        Codes(codes.values, bits, codes.scale, codes.zero),
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    """Eight neighbouring rows in a word, in the order 0 2 4 6 1 3 5 7."""
    codes = codes_of(4, symmetric=symmetric)
    zeros = torch.zeros(codes.scale.shape, dtype=torch.int8) if codes.zero is None else codes.zero
    expected = {
        "qweight": awq_packed(codes.values.T + 8),
        "qzeros": awq_packed(zeros.T + 8),
        "scales": codes.scale.T,
    }
    stored = {part: awq.pack(codes, part) for part in awq.PARTS}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[part], tensor) for part, tensor in expected.items())
    assert_equal(awq.unpack(stored), Codes(codes.values, 4, codes.scale, zeros))


@pytest.mark.parametrize(("scheme", "bits"), [("W4A16", 4), ("W4A16_ASYM", 4), ("W2A16", 2), ("W8A16", 8), ("W8A8", 8)])
def test_compressed_tensors(scheme: str, bits: int) -> None:
    """A weight on a grid, against words written out and the values that the library restores; also joined from two parts."""
    chosen = resolve(scheme, group_size=GROUP if "A16" in scheme else None)
    known = codes_of(bits, symmetric=bool(chosen.args.symmetric))
    groups = COLUMNS // GROUP if chosen.args.strategy == "group" else 1
    zero = None if known.zero is None else known.zero[:, :groups]
    codes = Codes(known.values, bits, known.scale[:, :groups].float(), zero)
    places = torch.arange(COLUMNS) // (COLUMNS // groups)
    values = (codes.values.float() - (0 if zero is None else zero[:, places])) * codes.scale[:, places]
    grid = Grid(chosen.args, codes.scale, codes.scale, None if zero is None else zero.float(), COLUMNS // groups)
    stored = compressed_tensors.pack(values, grid, chosen)
    assert set(stored) <= set(compressed_tensors.PARTS)
    if "weight_packed" in stored:
        assert torch.equal(stored["weight_packed"], packed(codes.values.int() + 2 ** (bits - 1), bits))
    assert_equal(compressed_tensors.unpack(stored, chosen.args), codes)
    assert torch.equal(compressed_tensors.restore(stored, chosen), values)
    whole = QuantizedWeight(values, grid)
    joined = compressed_tensors.join_rows([whole.rows(*part).stored(chosen) for part in ((0, 128), (128, ROWS))])
    assert joined.keys() == stored.keys()
    assert all(torch.equal(joined[part], tensor) for part, tensor in stored.items())
