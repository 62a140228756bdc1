"""Large pages hold what was put there, whatever its size and type."""

from __future__ import annotations

import gc

import pytest
import torch
from smelt.system.hardware.pages import in_large_pages, joined_in_large_pages, zeros_in_large_pages


@pytest.mark.few(3)
@pytest.mark.parametrize("count", [0, 7, (1 << 20) + 3, 5 << 20])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_copy_is_equal_and_its_own(count: int, dtype: torch.dtype) -> None:
    source = torch.arange(count).to(dtype)
    found = in_large_pages(source)
    assert torch.equal(found, source)
    assert found.is_contiguous()
    if source.nbytes >= 2 << 20:
        assert found.data_ptr() % (2 << 20) == 0
    kept = found[-1:].clone()
    del source, found
    gc.collect()
    other = zeros_in_large_pages((count,), dtype)
    assert not other.any()
    assert kept.numel() == min(count, 1)


def test_what_is_not_contiguous_becomes_so() -> None:
    source = torch.randn(1024, 1536, generator=torch.Generator().manual_seed(0))
    found = in_large_pages(source.T)
    assert found.is_contiguous()
    assert torch.equal(found, source.T)


def test_what_is_there_already_is_not_copied() -> None:
    there = in_large_pages(torch.ones(3 << 20, dtype=torch.uint8))
    assert in_large_pages(there).data_ptr() == there.data_ptr()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    view = in_large_pages(torch.full((3 << 20,), 7, dtype=torch.uint8))[5:9].view(2, 2)
    gc.collect()
    assert view.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("columns", [3, 1 << 16])
def test_parts_that_follow_each_other_are_joined_where_they_are(columns: int) -> None:
    whole = zeros_in_large_pages((30, columns), torch.bfloat16).normal_()
    parts = whole.split([8, 2, 20])
    assert joined_in_large_pages(parts).data_ptr() == whole.data_ptr()
    assert joined_in_large_pages(parts).equal(whole)
    assert in_large_pages(joined_in_large_pages(parts)).data_ptr() == whole.data_ptr()


def test_others_are_copied() -> None:
    whole = torch.randn(30, 1 << 15)
    first, second, third = whole.split(10)
    for parts in ((first, third), (second, first), (first, second.clone()), (first, second[:, :8].repeat(1, 1 << 12))):
        found = joined_in_large_pages(parts)
        assert found.equal(torch.cat(parts))
        assert found.data_ptr() != whole.data_ptr()
