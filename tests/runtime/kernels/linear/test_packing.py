"""What packed weights weigh, and that a launch reads each byte of them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from smelt.runtime.kernels.base.kernel import problem
from smelt.runtime.kernels.linear import codes_weight, linear_bytes, linear_codes
from smelt.runtime.kernels.linear.linear_bytes import BytesCase
from smelt.runtime.kernels.linear.linear_codes import CodesCase
from smelt.runtime.kernels.linear.packing import FORMATS
from smelt.runtime.kernels.tiles.tile import Tile

from ..interpreter import interpreted

pytestmark = interpreted
DRAW = torch.Generator().manual_seed(0)
F = torch.float16


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("case", "bits"),
    [
        (CodesCase("int4", 1, 256, 1024, 128), 4 + 16 / 128),
        (CodesCase("int4", 1, 256, 1024, 32), 4 + 16 / 32),
        (CodesCase("int4", 1, 256, 1024, 128, zero=True), 4 + 32 / 128),
        (CodesCase("int4", 1, 256, 1024, 0), 4 + 32 / 1024),
        (CodesCase("int3", 1, 256, 1024, 64), 3 + 16 / 64),
        (CodesCase("int2", 1, 256, 1024, 64), 2 + 16 / 64),
        (CodesCase("int8", 1, 256, 1024, 128), 8 + 16 / 128),
        (CodesCase("nested8", 1, 256, 1024, 128), 8 + 16 / 128),
        (CodesCase("upper4", 1, 256, 1024, 128), 4 + 16 / 128),
        (CodesCase("sparse4", 1, 256, 1024, 128), 3 + 16 / 128),  # of all weights, pruned or not
        (CodesCase("float4", 1, 256, 1024, 16, scale="e4m3"), 4 + 8 / 16 + 32 / 1024),
        (CodesCase("float4", 1, 256, 1024, 32, scale="e8m0"), 4 + 8 / 32),
        (CodesCase("float8", 1, 256, 1024, 128, scale="full"), 8 + 32 / 128),
    ],
    ids=lambda value: value.name if isinstance(value, CodesCase) else "",
)
def test_bytes_are_what_arithmetic_says(case: CodesCase, bits: float) -> None:
    weight = codes_weight.prepare(**case.weight(DRAW)[0])
    assert weight.nbytes == 256 * 1024 * bits / 8
    tile = Tile(64, 16, 256, 2, 4, 3, False)
    x = torch.randn(3, 1024).to(F)
    parts = [t for t in (weight.codes, weight.more, weight.scales, weight.row_scales) if t is not None]
    with traffic(parts) as read:
        linear_codes.linear_codes(x, weight, tile)
    assert read == [part.nbytes for part in parts]


def test_wide_inputs_read_the_weight_once_for_each_tile_of_rows() -> None:
    case = CodesCase("int4", 1, 128, 512, 128)
    weight = codes_weight.prepare(**case.weight(DRAW)[0])
    with traffic([weight.codes]) as read:
        linear_codes.linear_codes(torch.randn(33, 512).to(F), weight, Tile(64, 16, 256, 2, 4, 3, False))
    assert read == [3 * weight.codes.nbytes]


def test_bytes_of_8_bit_weights() -> None:
    case = BytesCase(torch.int8, 1, 256, 1024)
    weight = linear_bytes.prepare(**case.weight(DRAW)[0])
    assert weight.nbytes == 256 * 1024 + 256 * 4
    with traffic([weight.codes]) as read:
        linear_bytes.linear_bytes(torch.randn(3, 1024).to(F), weight, Tile(64, 16, 128, 4, 4, 3, False))
    assert read == [weight.codes.nbytes]


@contextmanager
def traffic(tensors: list[torch.Tensor]) -> Iterator[list[int]]:
    """Count the bytes of tensors that the interpreter's programs load."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    original = builder.create_masked_load
    found = [0] * len(tensors)
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def counted(pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = original(pointers, mask, *rest)
        addresses = pointers.data[mask.data.astype(bool)]
        for i, (first, end) in enumerate(spans):
            found[i] += int(((addresses >= first) & (addresses < end)).sum()) * loaded.data.itemsize
        return loaded

    builder.create_masked_load = counted
    try:
        yield found
    finally:
        builder.create_masked_load = original


def prepared(**changes: Any) -> codes_weight.CodesWeight:
    given = CodesCase("int4", 1, 32, 128, 64).weight(DRAW)[0]
    return codes_weight.prepare(**(given | changes))


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("kernels take multiples of 16", {"scale": torch.ones(32, 16).half()}),
        ("do not divide into 3 groups", {"scale": torch.ones(32, 3).half()}),
        ("need 16-bit scales", {"scale": torch.ones(32, 2), "zero": torch.zeros(32, 2, dtype=torch.int32)}),
        ("not 2:4 sparse", {"form": "sparse4", "codes": torch.ones(32, 128, dtype=torch.int64)}),
        (
            "multiples of 64",
            {"form": "sparse4", "codes": torch.zeros(32, 128, dtype=torch.int64), "scale": torch.ones(32, 4).half()},
        ),
        (
            "take multiples of 16",
            {"gate": "silu", "codes": torch.zeros(24, 128, dtype=torch.int64), "scale": torch.ones(24, 2).half()},
        ),
        ("scales of torch.float64", {"scale": torch.ones(32, 2).double()}),
    ],
)
def test_what_the_kernel_cannot_take_is_reported(what: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=what):
        prepared(**changes)


def test_inputs_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs are \[1, 64\] for a weight of 128 columns"):
        linear_codes.linear_codes(torch.ones(1, 64).half(), prepared(), Tile(64, 16, 64, 1, 4, 2, False))


def test_no_rows_need_no_launch() -> None:
    assert linear_codes.linear_codes(torch.ones(0, 128).half(), prepared(), Tile(64, 16, 64, 1, 4, 2, False)).shape == (
        0,
        32,
    )


def test_experts_must_be_alike() -> None:
    with pytest.raises(ValueError, match="must all be stored alike"):
        codes_weight.CodesWeight.joined([prepared(), replace(prepared(), group=32)])


def test_every_format_has_a_case() -> None:
    used = {case.name.split()[0] for case in linear_codes.KERNEL.cases}
    assert used == set(FORMATS)


def test_a_tile_that_would_leave_outputs_out_is_refused() -> None:
    wide = Tile(256, 16, 64, 1, 8, 2, True)
    with pytest.raises(ValueError, match="384 outputs do not divide into tiles of 256"):
        problem(CodesCase("int4", 16, 384, 256, 128, tile=wide).case(), torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="384 outputs do not divide into tiles of 256"):
        problem(BytesCase(torch.int8, 16, 384, 256, tile=wide).case(), torch.device("cpu"), 0)
