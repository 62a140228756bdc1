"""Memory in large pages, for what is read whole at every step.

With pages of 4 kB a processor spends part of its reads on looking up where pages are. Where the kernel gives large ones
only on request, as most distributions set it, an allocator does not get them.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_PAGE = 2 << 20


def zeros_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Like ``torch.zeros``; memory is taken as it is written to.

    Small tensors, other devices, and systems without large pages get plain ones.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    if count < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    room = mmap.mmap(-1, count + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    return whole[begin : begin + count].view(dtype).view(shape)


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, there: a copy unless it begins a large page already."""
    if tensor.nbytes < _PAGE or (tensor.is_contiguous() and tensor.data_ptr() % _PAGE == 0):
        return tensor.contiguous()
    return zeros_in_large_pages(tuple(tensor.shape), tensor.dtype).copy_(tensor)
