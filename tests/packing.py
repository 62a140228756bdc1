"""The words of GPTQ and AWQ, written out from the formats' definitions and kept apart from the code they check."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as int32 words, written out bit by bit."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * i) for i, code in enumerate(row))
        words = -(-bits * len(row) // 32)
        rows.append([(whole >> (32 * i)) & 0xFFFFFFFF for i in range(words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def awq_packed(codes: Tensor) -> Tensor:
    """AWQ's order: bits 4j of a word hold code number (0, 2, 4, 6, 1, 3, 5, 7)[j] of eight."""
    eight = codes.long().unflatten(1, (-1, 8))
    word = sum(eight[..., place] << (4 * j) for j, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()
