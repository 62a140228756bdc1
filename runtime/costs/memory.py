"""How much of a device's memory weights and cached keys and values can have."""

from __future__ import annotations

# The engine's default share of the memory that it takes.
UTILIZATION = 0.9
# Activations and graphs take so much of a device's memory beside weights and cache. An assumption.
ACTIVATIONS_SHARE = 0.05


def usable_memory(memory_bytes: float, utilization: float = UTILIZATION) -> float:
    """The bytes for weights and cache in a device's memory.

    Args:
        memory_bytes: of the device.
        utilization: the share of them that an engine takes, activations included.
    """
    return memory_bytes * (utilization - ACTIVATIONS_SHARE)
