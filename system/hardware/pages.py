"""Memory in large pages, for what is read whole at every step.

With pages of 4 kB a processor spends part of its reads on looking up where pages are. Where the kernel gives large ones
only on request, as most distributions set it, an allocator does not get them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

_PAGE = 2 << 20
_keep: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("keep", default=None)


def zeros_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Like ``torch.zeros``, on the CPU unless ``device`` is given; memory is taken as it is written to.

    Small tensors, other devices, and systems without large pages get plain ones.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    if count < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    room = mmap.mmap(-1, count + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    return whole[begin : begin + count].view(dtype).view(shape)


@contextlib.contextmanager
def weights_kept_by(keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, what a linear multiplies by goes where ``keep`` puts it."""
    before = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(before)


def weights_are_elsewhere() -> bool:
    """Whether weights are kept elsewhere just now."""
    return _keep.get() is not None


def as_weight(tensor: Tensor) -> Tensor:
    """A weight as a linear keeps it: itself, unless weights are kept elsewhere."""
    keep = _keep.get()
    return tensor if keep is None else keep(tensor)


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, there: a copy unless it begins a large page already, or weights are kept elsewhere."""
    keep = _keep.get()
    if keep is not None:
        return keep(tensor)
    if tensor.nbytes < _PAGE or (tensor.is_contiguous() and tensor.data_ptr() % _PAGE == 0):
        return tensor.contiguous()
    return zeros_in_large_pages(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def joined_in_large_pages(tensors: Sequence[Tensor]) -> Tensor:
    """Like ``torch.cat``, there; no copy if they lie there one after another."""
    first = tensors[0]
    if _follow_each_other(tensors):
        return first.as_strided((sum(len(t) for t in tensors), *first.shape[1:]), first.stride())
    if first.device.type != "cpu" or any(t.dtype != first.dtype or t.shape[1:] != first.shape[1:] for t in tensors):
        return torch.cat(list(tensors))
    whole = zeros_in_large_pages((sum(len(t) for t in tensors), *first.shape[1:]), first.dtype)
    for part, tensor in zip(whole.split([len(t) for t in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return whole


def _follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one type and of rows of one shape are parts of one, in order."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:] and tensor.is_contiguous()
        if (
            not alike
            or tensor.data_ptr() != end
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return False
        end += tensor.nbytes
    return True
