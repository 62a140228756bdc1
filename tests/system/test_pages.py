"""Memory in large pages: what is joined there, and what is not copied again."""

from __future__ import annotations

import pytest
import torch
from smelt.system.pages import in_large_pages, joined_in_large_pages, zeros_in_large_pages


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
