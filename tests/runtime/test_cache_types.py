"""The table of cache types against those that read it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from compressed_tensors.quantization.utils import calculate_range
from smelt.quant.cache_types import CHOICES
from smelt.quant.scheme import cache_args
from smelt.runtime.cache_types import BY_NAME, CACHE_TYPES, CacheType, cache_type_of, names_for
from smelt.runtime.decoder.parts.kv_cache import KeysValues, PagedKeysValues
from smelt.runtime.gpu.cache import GpuKeysValues

CPU = torch.device("cpu")
HEADS, SIZE, BLOCK = 2, 64, 16


def test_each_row_is_found_again() -> None:
    assert [cache_type_of(each.torch_dtype(torch.bfloat16)) for each in CACHE_TYPES] == list(CACHE_TYPES)
    assert cache_type_of(torch.float16) == BY_NAME["auto"]
    kinds = [each.kind for each in CACHE_TYPES]
    numbers = [each.native for each in CACHE_TYPES if each.native is not None]
    assert len(set(kinds)) == len(kinds)
    assert len(set(numbers)) == len(numbers)


def _store(each: CacheType, on_gpu: bool) -> KeysValues:
    kept = each.torch_dtype(torch.bfloat16)
    if on_gpu:
        return GpuKeysValues([HEADS], SIZE, 2, BLOCK, kept, CPU)
    return PagedKeysValues([HEADS], SIZE, 2, BLOCK, kept)


@pytest.mark.parametrize(("each", "on_gpu"), product(CACHE_TYPES, [False, True]), ids=str)
def test_every_type_is_read_as_it_was_written(each: CacheType, on_gpu: bool) -> None:
    """To half a step of its codes, where the operators keep it."""
    if ("gpu" if on_gpu else "torch") not in each.operators:
        pytest.skip("is kept on GPUs only")
    store = _store(each, on_gpu)
    values = torch.randn(BLOCK, HEADS, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    store.write(0, torch.arange(BLOCK), values, values)
    largest = values.float().abs().amax(-1, keepdim=True)
    # Keys that are rotated have other largest numbers: by at most the root of how many are rotated together.
    for found, wider in zip(
        store.read(0, torch.tensor([0]), torch.float32), (8 if each.rotated else 1, 1), strict=True
    ):
        step = 2**-8 if each.limit is None else 1 / each.limit if "int" in each.name else 2**-3
        wrong = (found.transpose(0, 1) - values.float()).abs()
        assert (wrong <= wider * largest * (step / 2 + 2**-8)).all()


def test_blocks_are_measured_as_they_are() -> None:
    for each in CACHE_TYPES:
        kept = each.torch_dtype(torch.bfloat16)
        scales = 0 if each.limit is None else 2 * 4 * BLOCK
        bits = 8 * each.stored_dtype(torch.bfloat16).itemsize // each.codes_per_byte
        assert GpuKeysValues.block_bytes([HEADS], SIZE, BLOCK, kept) == HEADS * (2 * BLOCK * SIZE * bits // 8 + scales)
        if "torch" in each.operators:
            assert PagedKeysValues.block_bytes([HEADS], SIZE, BLOCK, kept) == HEADS * (
                2 * BLOCK * SIZE * bits // 8 + scales
            )


def test_what_operators_keep() -> None:
    assert names_for("torch") == names_for("native") == ["auto", "int8", "fp8"]
    assert names_for("gpu") == ["auto", "int8", "fp8", "int4"]


def test_codes_reach_as_far_as_those_of_a_recipe() -> None:
    assert CHOICES == ("fp8", "int8", "int4")
    for name in CHOICES:
        least, most = (float(end) for end in calculate_range(cache_args(name, None, SIZE), CPU))
        kept = BY_NAME[name]
        own_least, own_most = (-kept.limit, kept.limit) if kept.type == "float" and kept.limit else kept.code_range
        assert own_most == most
        assert own_least == (-127 if name == "int8" else least)
