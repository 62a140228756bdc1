"""Which blocks of slots go to which expert, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from smelt.runtime.kernels.linear.routing import route


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "rows"),
    [(1, 4, 2, 16), (7, 8, 2, 4), (64, 8, 2, 16), (33, 3, 1, 16), (5, 64, 8, 16)],
)
def test_every_slot_is_in_one_block_of_its_expert(tokens: int, experts: int, choices: int, rows: int) -> None:
    chosen = torch.rand(tokens, experts).argsort(-1)[:, :choices]
    found = route(chosen, experts, rows)
    blocks = found.slots.view(-1, rows)
    assert len(blocks) == len(found.block_expert)
    seen = []
    for block, expert in zip(blocks.tolist(), found.block_expert.tolist(), strict=True):
        held = [slot for slot in block if slot < found.total]
        if expert < 0:
            assert held == []
        for slot in held:
            assert chosen.flatten()[slot] == expert
        seen += held
    assert sorted(seen) == list(range(tokens * choices))
    # No expert has more blocks than it needs.
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    assert int((found.block_expert >= 0).sum()) == int((-(-counts // rows)).sum())
