"""Host memory that a GPU copies from and to by itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def pinned_memory(shape: tuple[int, ...], dtype: torch.dtype, owner: object) -> Tensor:
    """As much as it says: torch's own pinned memory is rounded up to powers of two, and kept.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        owner: as long as this lives, the memory stays pinned.

    Raises:
        MemoryError: the system does not pin so much.
        RuntimeError: there is no such amount.
    """
    found = torch.empty(shape, dtype=dtype, device="cpu")
    if found.nbytes:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(found.data_ptr(), found.nbytes, 0)):
            raise MemoryError(f"{found.nbytes} bytes cannot be pinned")
        weakref.finalize(owner, runtime.cudaHostUnregister, found.data_ptr())
    return found
