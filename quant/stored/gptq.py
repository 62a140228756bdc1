"""GPTQ's layout, as AutoGPTQ defined it and GPTQModel, vLLM and transformers read it.

A linear of ``bits`` bits has ``qweight`` int32 ``[columns * bits / 32, rows]``, ``qzeros`` int32
``[groups, rows * bits / 32]``, ``scales`` float16 ``[groups, rows]`` and ``g_idx`` int32 ``[columns]``, the group of each
column. Codes are unsigned, dense and little-endian. Version 1 stores each zero-point minus one.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor

from .codes import Codes

BITS = (2, 3, 4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def pack(codes: Codes, part: str, version: int) -> Tensor:
    """One of the tensors that store a weight: a name of :data:`PARTS`."""
    if part == "qweight":
        return pack_to_int32(codes.values, codes.bits).T.contiguous()
    if part == "qzeros":
        stored = codes.zeros() - 1 if version == 1 else codes.zeros()
        return pack_to_int32(stored.to(torch.int8).T.contiguous(), codes.bits)
    if part == "scales":
        return codes.scale.T.half()
    assert part == "g_idx"
    columns, groups = codes.values.shape[1], codes.scale.shape[1]
    contiguous = torch.arange(columns, dtype=torch.int32) // (columns // groups)
    return contiguous if codes.places is None else codes.places.int()


def unpack(stored: dict[str, Tensor], bits: int, version: int) -> Codes:
    """The codes that stored tensors, by :data:`PARTS`, hold; ``g_idx`` may be missing."""
    middle = 2 ** (bits - 1)
    scale = stored["scales"].T.contiguous()
    zero = _unpacked(stored["qzeros"], bits).T.contiguous()[: scale.shape[0]]
    centred = ((zero + 1 if version == 1 else zero) - middle).to(torch.int8)
    values = (_unpacked(stored["qweight"].T.contiguous(), bits) - middle).to(torch.int8)
    return Codes(values, bits, scale, centred if centred.any() else None, stored.get("g_idx"))


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes stored dense and little-endian along the last dimension of int32 words; of 3 bits some straddle two words."""
    rows, words = packed.shape
    wide = packed.long() & 0xFFFFFFFF
    count = words * 32 // bits
    first = torch.arange(count) * bits
    word, shift = first // 32, first % 32
    low = wide[:, word] >> shift
    following = wide[:, (word + 1).clamp_max(words - 1)]
    straddling = shift + bits > 32
    high = torch.where(straddling, following << (32 - shift), torch.zeros_like(low))
    return ((low | high) & (2**bits - 1)).view(rows, count)
