"""How fast a machine reads its memory and multiplies. Imports no engine, which takes seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...system.hardware.pages import in_large_pages
from ...system.hardware.resources import compute_dtype

_READ_BYTES = 1 << 29
_PRODUCT = 2048


@dataclass
class MachineSpeed:
    """The machine's peak rates.

    Attributes:
        read_bytes: memory read bandwidth in bytes per second; on a GPU that of a large copy, read and written.
        operations: per second, of a matrix product in the model's compute dtype.
        dtype: that dtype.
        device: ``cpu``, or the name of a GPU.
    """

    read_bytes: float
    operations: float
    dtype: str
    device: str


def machine_rates(device: torch.device, dtype: torch.dtype) -> MachineSpeed:
    """A device's peak rates.

    Args:
        device: a CPU or a GPU.
        dtype: of the matrix product.
    """
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return MachineSpeed(read_rate(), product_rate(dtype), name, "cpu")
    from ..kernels.tools.timing import copy_rate, matmul_rate

    with torch.cuda.device(device):
        return MachineSpeed(copy_rate(device), matmul_rate(device, dtype), name, torch.cuda.get_device_name(device))


def read_rate() -> float:
    """Bytes a second that this process reads from memory."""
    block = in_large_pages(torch.ones(_READ_BYTES // 4))
    return max(_READ_BYTES / _timed(block.sum) for _ in range(5))


def product_rate(dtype: torch.dtype) -> float:
    """Additions and multiplications a second, of torch's matrix product.

    Of bfloat16 numbers in float32 where they have to be widened first: so Smelt's kernels multiply them, and torch's own product is
    many times slower.
    """
    a = torch.randn(_PRODUCT, _PRODUCT).to(compute_dtype(dtype) if dtype == torch.bfloat16 else dtype)
    return max(2 * _PRODUCT**3 / _timed(lambda: a @ a) for _ in range(5))


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
