"""Cache blocks in host memory, or on a disk: the tensors behind the slots of a :class:`~smelt.runtime.blocks.host_tier.HostTier`."""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from ....system.errors import RuntimeProblem
from ....system.hardware.machine import human_bytes
from ....system.hardware.pinned import pinned_memory
from ...decoder.parts.kv_cache import KeysValues
from ...scheduling.plan import StepPlan
from ...scheduling.swapping import TransferCost
from ...weights.matrix import bits

_TRIALS = 5


class HostBlocks:
    """Copies blocks between a KV cache and host memory, which is pinned if the cache is on a GPU.

    Each slot is contiguous for each of the cache's tensors, over all layers.

    Args:
        store: the KV cache.
        slots: how many blocks to hold.
        directory: of a disk, for files in place of memory; the system keeps in memory what it has room for. They have no
            names, so that nothing is left when the process ends, however it ends.

    Raises:
        RuntimeProblem: there is no room on the disk, or nothing can be written there.
    """

    def __init__(self, store: KeysValues, slots: int, directory: Path | None = None) -> None:
        self._device: list[Tensor] = []
        self._host: list[Tensor] = []
        self.slots, self._directory = slots, directory
        for tensor in store.by_block():
            self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Hold the blocks of another tensor, too.

        Args:
            tensor: ``[layers, blocks, ...]``.

        Raises:
            RuntimeProblem: as the constructor.
        """
        each = bits(tensor)
        shape = (self.slots, len(each), *each.shape[2:])
        pinned = each.device.type == "cuda"
        self._device.append(each)
        if self._directory is not None:
            self._host.append(_mapped(shape, each.dtype, self._directory))
            return
        try:
            self._host.append(
                pinned_memory(shape, each.dtype, self) if pinned else torch.empty(shape, dtype=each.dtype)
            )
        except (MemoryError, RuntimeError):
            needed = human_bytes(math.prod(shape) * each.itemsize)
            raise RuntimeProblem(f"the host has no {needed} of memory for blocks; lower host_cache_bytes") from None

    def swap(self, plan: StepPlan) -> None:
        """Copy a step's blocks out, then in. On a GPU the copies are queued before the step's kernels."""
        for here, there in zip(self._device, self._host, strict=True):
            for block, slot in plan.swap_out:
                there[slot].copy_(here[:, block], non_blocking=True)
            for slot, block in plan.swap_in:
                here[:, block].copy_(there[slot], non_blocking=True)

    @property
    def block_bytes(self) -> int:
        """Memory of a slot."""
        return sum(each[0].nbytes for each in self._host)

    def measured_cost(self) -> TransferCost:
        """The time of transfers, from copies out of a few blocks, which are left as they are."""
        count = min(self.slots, self._device[0].shape[1], 8)
        seconds = {}
        for blocks in {1, count}:
            plan = StepPlan([], swap_out=[(i, i) for i in range(blocks)])
            seconds[blocks] = min(self._timed(plan) for _ in range(_TRIALS))
        transfers = len(self._host)
        size = self.block_bytes
        more = seconds[count] - seconds[1]
        rate = size * (count - 1) / more if more > 0 else size * count / seconds[count]
        each = max(0.0, seconds[1] - size / rate) / transfers
        return TransferCost(size, -(-size // transfers), each, rate)

    def _timed(self, plan: StepPlan) -> float:
        device = self._device[0].device
        begun = time.perf_counter()
        self.swap(plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, directory: Path) -> Tensor:
    """A tensor in a file without a name."""
    count = math.prod(shape)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="smelt-kv-") as file:
            # Reserved now: a disk that is full later would end the process at a write.
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise RuntimeProblem(
            f"host_cache_directory: {directory} cannot hold {human_bytes(count * dtype.itemsize)} ({error.strerror}); choose another"
            " or lower host_cache_bytes"
        ) from None
