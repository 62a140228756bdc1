"""The kernels' targets, with the limits that decide occupancy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        name: its name for users.
        backend, arch, lanes: Triton's names for it, and its warp size.
        units: streaming multiprocessors, or compute units, of its usual card.
        shared: most bytes of shared memory of one program.
        shared_of_unit: bytes of shared memory of a unit.
        registers: 32-bit registers of a unit's share that a warp's lanes are given from.
        warps: most warps of a unit.
        matrix: the prefix of its tensor core instructions.
        narrow: the prefix of an older generation's; good enough for products of few rows.
        float8: the 8-bit float dtype that they multiply; None if unsupported.
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
    # Blackwell's fifth-generation tensor cores do not support int8, which uses the older instructions.
    Target("sm_100", "cuda", 100, 32, 148, 232448, 233472, 65536, 64, ("UTCHMMA", "UTCQMMA", "IMMA"), ("HMMA",), _E4M3),
    # Its barrier does not wait for other waves' stores to arrive, so that the last program might miss some (Triton 3.7.1).
    Target("gfx942", "hip", "gfx942", 64, 304, 65536, 65536, 131072, 32, ("v_mfma",), (), _E4M3FNUZ, splits=False),
)
TARGETS = {target.name: target for target in _ALL}


def splitting(names: Sequence[str]) -> tuple[str, ...]:
    """Of some targets' names, or of all, those whose programs see each other's stores."""
    return tuple(name for name in names or TARGETS if TARGETS[name].splits)


def target_of(device: torch.device) -> Target:
    """The target of a device, with the device's number of units.

    Raises:
        ValueError: no kernel supports it.
    """
    if device.type != "cuda":
        # Triton's interpreter has no target; any tiles work, and fewer programs are faster.
        return replace(TARGETS["sm_90"], units=4)
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = str(facts.gcnArchName).split(":")[0]
    else:
        # Blackwell's desktop cards (12) have Ampere's tensor core instructions.
        name = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}.get(facts.major, f"sm_{facts.major}{facts.minor}")
    if name not in TARGETS:
        raise ValueError(f"{facts.name} ({name}) is not one of the kernels' targets: {', '.join(TARGETS)}")
    found = replace(TARGETS[name], units=facts.multi_processor_count)
    if torch.version.hip is None:
        found = replace(found, shared=min(found.shared, facts.shared_memory_per_block_optin))
    return found
