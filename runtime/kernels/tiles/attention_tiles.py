"""Attention tiles: rules by kind of device, for shapes that were not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ...cache_types import BY_KIND
from ...heads import Heads
from ..base.targets import Target
from ..rows.cached import padded


@dataclass(frozen=True)
class PromptTile:
    """How a program's part of the scores is cut.

    Attributes:
        queries: rows of a tile: tokens times the heads of a group.
        positions: columns.
        warps, stages: of a program.
    """

    queries: int
    positions: int
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a tile."""
        return max(1, self.queries // group)


@dataclass(frozen=True)
class TokenTile:
    """How a program's part is cut.

    Attributes:
        positions: of a tile.
        least: tiles of a part, at least, so that merging does not cost more than it brings.
        warps, stages: of a program.
        waves: programs for each unit of the device.
    """

    positions: int
    least: int
    warps: int
    stages: int
    waves: int


def prompt_tile(target: Target, heads: Heads, dtype: torch.dtype, kind: str) -> PromptTile:
    """The largest tiles without register spills, according to the compiler; never measured on a GPU.

    A load waits for the block's number that leads to it, so that twice as many stages are as many loads in flight.
    """
    large, codes = padded(heads.size) > 128, kind != "plain"
    small = padded(heads.size) <= 64
    if dtype == torch.float32:
        found = PromptTile(16, 16, 8 if large else 4, 1)
    elif target.backend == "hip":
        found = PromptTile(64, 32, 4, 1)
    elif large:
        found = PromptTile(32 if codes else 64, 32, 8, 6)
        if target.name != "sm_80" and not codes:
            found = PromptTile(128, 32, 8, 6)
    elif target.name == "sm_80":
        found = PromptTile(64, 32, 8, 6) if codes else PromptTile(128, 64 if small else 32, 8, 6)
    else:
        positions = 64 if codes else 128
        if target.name == "sm_100" and (codes or heads.window):
            positions //= 2
        found = PromptTile(128, positions, 8, 6 if codes or small else 5)
    return replace(found, queries=max(found.queries, triton.next_power_of_2(heads.group)))


def token_tile(target: Target, heads: Heads, dtype: torch.dtype, kind: str) -> TokenTile:
    """The largest tiles without register spills, according to the compiler; never measured on a GPU."""
    large, small = padded(heads.size) > 128, padded(heads.size) <= 64
    rows = rows_of_group(heads.group, target)
    if dtype == torch.float32:
        found = TokenTile(16 if large else 32, 8, 4, 1, 2)
    elif target.backend == "hip":
        found = TokenTile(32, 8, 4, 1, 2)
    else:
        codes, packed = kind != "plain", BY_KIND[kind].packed
        positions = (64 if codes else 32) if large else 128 if small or codes else 64
        if (target.name == "sm_80" and (small or codes)) or (target.name == "sm_100" and packed and not large):
            positions //= 2
        # A block's number is read before what it leads to; so twice as many stages are as many loads in flight. Packed
        # ones are half as long.
        stages = 8 if packed and positions == 128 else 6
        warps = 8 if target.name == "sm_100" and large and codes else 4
        found = TokenTile(positions, 4, warps, stages, 2)
    # Many heads of a group take the registers that positions would; sums of Blackwell's products are not in registers.
    few = 64 if target.name == "sm_100" and rows <= 64 else 32
    fewer = max(16, found.positions * few // max(rows, few))
    return replace(found, positions=fewer, warps=8 if rows > 32 else found.warps)


def rows_of_group(group: int, target: Target) -> int:
    """Columns of a tile with so many heads: what tensor cores multiply."""
    return max(16 if target.backend == "hip" else 8, 1 << (group - 1).bit_length())
