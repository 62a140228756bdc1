"""The machines that kernels are compiled for, with the limits that decide how many programs run at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        name: as users write it.
        backend, arch, lanes: what Triton calls it, and the width of its warps.
        units: streaming multiprocessors, or compute units, of its usual card.
        shared: bytes of shared memory that one program may have.
        shared_of_unit: that all programs on a unit share.
        registers: 32-bit registers of a unit's share that a warp's lanes are given from.
        warps: that a unit holds at most.
        matrix: how its tensor cores' instructions begin.
        narrow: how those begin that an older generation had; good enough where a product has few rows.
        float8: the 8-bit floats that they multiply; None if they do not.
        splits: whether programs may share a tile's columns.
    """

    name: str
    backend: str
    arch: int | str
    lanes: int
    units: int
    shared: int
    shared_of_unit: int
    registers: int
    warps: int
    matrix: tuple[str, ...]
    narrow: tuple[str, ...]
    float8: torch.dtype | None
    splits: bool = True

    def of_triton(self) -> Any:
        """Triton's own description."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.lanes)


_E4M3, _E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_ALL = (
    Target("sm_80", "cuda", 80, 32, 108, 166912, 167936, 65536, 64, ("HMMA", "IMMA"), (), None),
    Target(
        "sm_90", "cuda", 90, 32, 132, 232448, 233472, 65536, 64, ("HGMMA", "IGMMA", "QGMMA"), ("HMMA", "IMMA"), _E4M3
    ),
    # Blackwell's fifth-generation tensor cores know no int8; that goes to the older instructions.
    Target("sm_100", "cuda", 100, 32, 148, 232448, 233472, 65536, 64, ("UTCHMMA", "UTCQMMA", "IMMA"), ("HMMA",), _E4M3),
    # Its barrier does not wait for other waves' stores to arrive, so that the last program might miss some (Triton 3.7.1).
    Target("gfx942", "hip", "gfx942", 64, 304, 65536, 65536, 131072, 32, ("v_mfma",), (), _E4M3FNUZ, splits=False),
)
TARGETS = {target.name: target for target in _ALL}


def target_of(device: torch.device) -> Target:
    """The target that a device belongs to, with its own number of units.

    Raises:
        ValueError: no kernel is made for it.
    """
    if device.type != "cuda":
        # Triton's interpreter stands for no machine; any tiles do, and the fewer programs the sooner it is done.
        return replace(TARGETS["sm_90"], units=4)
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = str(facts.gcnArchName).split(":")[0]
    else:
        # Blackwell's desktop cards (12) have the tensor cores of Ampere.
        name = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}.get(facts.major, f"sm_{facts.major}{facts.minor}")
    if name not in TARGETS:
        raise ValueError(f"{facts.name} ({name}) is not one of the kernels' targets: {', '.join(TARGETS)}")
    found = replace(TARGETS[name], units=facts.multi_processor_count)
    if torch.version.hip is None:
        found = replace(found, shared=min(found.shared, facts.shared_memory_per_block_optin))
    return found
