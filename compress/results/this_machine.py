"""Facts of this machine, and whether two reports come from the same machine."""

from __future__ import annotations

import os
import platform

import psutil

from ...system.hardware.machine import processor_name
from .result import Machine

# The size of memory is reported a little differently after a system's update.
_MEMORY_TOLERANCE = 0.05


def this_machine(device: str = "cpu") -> Machine:
    """This machine, before its rates are measured.

    Args:
        device: as torch names it; an unavailable one keeps that name.
    """
    import torch

    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        device=_named(device),
    )


def differences(one: Machine, other: Machine) -> list[str]:
    """What makes two machines' speeds incomparable; empty if they are of the same kind."""
    found = [
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in ("processor", "cores", "threads", "system", "device")
        if getattr(one, name) != getattr(other, name)
    ]
    if abs(one.memory_bytes / other.memory_bytes - 1) > _MEMORY_TOLERANCE:
        found.append(f"memory {one.memory_bytes / 1e9:.0f} and {other.memory_bytes / 1e9:.0f} GB")
    return found


def _named(device: str) -> str:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return device
    return torch.cuda.get_device_name(device)
