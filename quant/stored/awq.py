"""AWQ's layout, version ``gemm``, as AutoAWQ defined it and vLLM, GPTQModel and transformers read it.

A linear has ``qweight`` int32 ``[columns, rows / 8]``, ``qzeros`` int32 ``[groups, rows / 8]`` and ``scales`` float16
``[groups, rows]``. A word holds the unsigned 4-bit codes of eight neighbouring rows, in an order of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import Codes

PARTS = ("qweight", "qzeros", "scales")
# Bits 4j to 4j+3 of a word hold this one of its eight codes.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: Codes, part: str) -> Tensor:
    """One of the tensors that store a weight: a name of :data:`PARTS`."""
    if part == "scales":
        return codes.scale.T.half()
    return _words(codes.values if part == "qweight" else codes.zeros())


def unpack(stored: dict[str, Tensor]) -> Codes:
    """The codes that stored tensors, by :data:`PARTS`, hold."""
    return Codes(_codes(stored["qweight"]), 4, stored["scales"].T.contiguous(), _codes(stored["qzeros"]))


def _words(codes: Tensor) -> Tensor:
    """Codes ``[rows, n]`` between -8 and 7 as words ``[n, rows / 8]``."""
    eight = (codes.T.int() + 8).unflatten(1, (-1, 8))[..., list(_ORDER)]
    # The highest four bits reach the sign bit, so words are built in int64 and then reinterpreted.
    words = (eight.long() << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _codes(words: Tensor) -> Tensor:
    """The codes ``[rows, n]`` of words ``[n, rows / 8]``."""
    shifts = torch.tensor([4 * _ORDER.index(place) for place in range(8)], dtype=torch.int32)
    codes = ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2).T - 8
    return codes.to(torch.int8).contiguous()
