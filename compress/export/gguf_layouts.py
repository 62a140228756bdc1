"""Block layouts of GGUF's number formats: one row per format, with the function that packs its codes into bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Encoded blocks; they mean ``scale * part_scale * codes + minimum * part_minimum``, parts repeated along the codes.

    Attributes:
        codes: int16 ``[blocks, size]``.
        scale: float16 ``[blocks]``.
        minimum: float16 ``[blocks]``, in layouts that have it; None for symmetric blocks.
        part_scale, part_minimum: integers ``[blocks, parts]``; None for layouts without parts.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    part_scale: Tensor | None = None
    part_minimum: Tensor | None = None

    def values(self) -> Tensor:
        """The dequantized values, float32 ``[blocks, size]``."""
        parts = 1 if self.part_scale is None else self.part_scale.shape[1]
        codes = self.codes.float().unflatten(1, (parts, -1))
        scale = self.scale.float()[:, None]
        values = codes * (scale if self.part_scale is None else scale * self.part_scale.float()).unsqueeze(-1)
        if self.minimum is not None:
            least = self.minimum.float()[:, None]
            least = least if self.part_minimum is None else least * self.part_minimum.float()
            values = values + least.unsqueeze(-1)
        return values.flatten(1)


@dataclass(frozen=True)
class BlockLayout:
    """One of GGUF's integer formats.

    Attributes:
        type: GGUF's name and number of it.
        size: elements in a block; rows must be whole blocks.
        low, high: the least and the greatest code.
        pack: blocks to bytes, uint8 ``[blocks, bytes]``.
        affine: whether a minimum is added.
        part: elements that share a part's scale, in blocks that have parts; 0 without.
        part_low, part_high: the least and the greatest scale of a part.
    """

    type: GGMLQuantizationType
    size: int
    low: int
    high: int
    pack: Callable[[Blocks], Tensor]
    affine: bool = False
    part: int = 0
    part_low: int = 0
    part_high: int = 0

    @property
    def name(self) -> str:
        return self.type.name


def joined(codes: Tensor, bits: int, *shape: int) -> Tensor:
    """Codes seen as ``[blocks, groups, parts, width]`` with the parts joined into bytes, the first part lowest."""
    seen = codes.to(torch.int32).view(len(codes), *shape)
    shifts = bits * torch.arange(shape[1], dtype=torch.int32)
    return (seen << shifts.view(1, 1, -1, 1)).sum(2).to(torch.uint8).flatten(1)


def _half(values: Tensor | None) -> Tensor:
    return _known(values).half().contiguous().view(-1, 1).view(torch.uint8)


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def _q8_0(blocks: Blocks) -> Tensor:
    return torch.cat([_half(blocks.scale), blocks.codes.to(torch.int8).view(torch.uint8)], 1)


def _q4_0(blocks: Blocks) -> Tensor:
    return torch.cat([_half(blocks.scale), joined(blocks.codes + 8, 4, 1, 2, 16)], 1)


def _q4_1(blocks: Blocks) -> Tensor:
    return torch.cat([_half(blocks.scale), _half(blocks.minimum), joined(blocks.codes, 4, 1, 2, 16)], 1)


def _q5_0(blocks: Blocks) -> Tensor:
    codes = blocks.codes + 16
    return torch.cat([_half(blocks.scale), joined(codes >> 4, 1, 4, 8, 1), joined(codes & 15, 4, 1, 2, 16)], 1)


def _q2_k(blocks: Blocks) -> Tensor:
    parts = (_known(blocks.part_scale) | (_known(blocks.part_minimum) << 4)).to(torch.uint8)
    return torch.cat([parts, joined(blocks.codes, 2, 2, 4, 32), _half(blocks.scale), _half(-_known(blocks.minimum))], 1)


def _q3_k(blocks: Blocks) -> Tensor:
    codes, parts = blocks.codes + 4, _known(blocks.part_scale) + 32
    scales = torch.cat([joined(parts & 15, 4, 1, 2, 8), joined(parts >> 4, 2, 1, 4, 4)], 1)
    high, low = joined(codes >> 2, 1, 1, 8, 32), joined(codes & 3, 2, 2, 4, 32)
    return torch.cat([high, low, scales, _half(blocks.scale)], 1)


def _q4_k(blocks: Blocks) -> Tensor:
    first, later = zip(_known(blocks.part_scale).split(4, 1), _known(blocks.part_minimum).split(4, 1), strict=True)
    # Six bits each: four whole ones in the low bits of a byte, the high bits of the other four above them.
    whole = [low | (high >> 4 << 6) for low, high in zip(first, later, strict=True)]
    rest = (later[0] & 15) | ((later[1] & 15) << 4)
    parts = torch.cat([*whole, rest], 1).to(torch.uint8)
    scales = [_half(blocks.scale), _half(-_known(blocks.minimum))]
    return torch.cat([*scales, parts, joined(blocks.codes, 4, 4, 2, 32)], 1)


def _q6_k(blocks: Blocks) -> Tensor:
    codes, parts = blocks.codes + 32, _known(blocks.part_scale).to(torch.int8).view(torch.uint8)
    low, high = joined(codes & 15, 4, 2, 2, 64), joined(codes >> 4, 2, 2, 4, 32)
    return torch.cat([low, high, parts, _half(blocks.scale)], 1)


# In the order in which they are tried: the smallest that holds a weight's codes is taken.
LAYOUTS = (
    BlockLayout(GGMLQuantizationType.Q2_K, 256, 0, 3, _q2_k, affine=True, part=16, part_high=15),
    BlockLayout(GGMLQuantizationType.Q3_K, 256, -4, 3, _q3_k, part=16, part_low=-32, part_high=31),
    BlockLayout(GGMLQuantizationType.Q4_0, 32, -8, 7, _q4_0),
    BlockLayout(GGMLQuantizationType.Q4_K, 256, 0, 15, _q4_k, affine=True, part=32, part_high=63),
    BlockLayout(GGMLQuantizationType.Q4_1, 32, 0, 15, _q4_1, affine=True),
    BlockLayout(GGMLQuantizationType.Q5_0, 32, -16, 15, _q5_0),
    BlockLayout(GGMLQuantizationType.Q6_K, 256, -32, 31, _q6_k, part=16, part_low=-128, part_high=127),
    BlockLayout(GGMLQuantizationType.Q8_0, 32, -128, 127, _q8_0),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}
