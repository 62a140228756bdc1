"""What is known of an H100, and what is assumed of it: every number that a prediction rests on, with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFigures:
    """A GPU's figures; times in seconds.

    Attributes:
        units, schedulers: streaming multiprocessors, and what issues instructions on each.
        clock: cycles a second.
        registers, shared, warps, programs: that a unit holds.
        memory: bytes that all of it has.
        bandwidth: bytes a second, by the data sheet.
        achieved: the share of it that a copy reaches.
        l2_bandwidth: bytes a second out of the second-level cache.
        unit_bytes: bytes a cycle from there to one unit.
        first_read: what the first read of a launch takes that goes to memory.
        loaded_read: what reads take while memory is busy, for the bytes that must be on their way.
        l2_read: what a read takes that the second-level cache has.
        tensor16, tensor8: operations a second of tensor cores with 16 and 8 bits.
        tensor_old: the share of it that the older, synchronous instructions reach.
        matrix_cycles: from one of those to the next that needs its sums.
        cycles: between two instructions of a warp that depend on each other now and then.
        slots: the share of issue slots that many warps fill.
        gap: from the end of a kernel to the first instruction of the next, in a CUDA graph.
        gap_dependent: the same with programmatic dependent launch.
        between_steps: from the end of a step's graph to the start of the next one's.
    """

    units: int
    schedulers: int
    clock: float
    registers: int
    shared: int
    warps: int
    programs: int
    memory: float
    bandwidth: float
    achieved: float
    l2_bandwidth: float
    unit_bytes: int
    first_read: float
    loaded_read: float
    l2_read: float
    tensor16: float
    tensor8: float
    tensor_old: float
    matrix_cycles: int
    cycles: float
    slots: float
    gap: float
    gap_dependent: float
    between_steps: float


H100 = GpuFigures(
    # NVIDIA's data sheet and Hopper white paper, for the SXM5 card.
    units=132,
    schedulers=4,
    clock=1.755e9,
    registers=65536,
    shared=233472,
    warps=64,
    programs=32,
    memory=80e9,
    bandwidth=3.35e12,
    tensor16=989e12,
    tensor8=1979e12,
    unit_bytes=64,
    # Assumed: copies of large tensors are usually reported between 3.0 and 3.1 TB/s.
    achieved=0.92,
    # Published by Chips and Cheese (2023) for the PCIe card, which has fewer units and a lower clock: a cautious figure here.
    l2_bandwidth=5.5e12,
    # Published by Luo and others (2024, microbenchmarks of Hopper): about 480 cycles to memory, 260 to the second-level cache,
    # one access at a time. Assumed on top: what a page's first access and a busy memory add.
    first_read=0.6e-6,
    loaded_read=0.8e-6,
    l2_read=0.2e-6,
    # From the same: mma.sync reaches about 62% of what wgmma does, and one takes about 33 cycles.
    tensor_old=0.62,
    matrix_cycles=33,
    # Assumed: arithmetic takes 4 cycles, and every other instruction or so does not depend on the one before.
    cycles=2.5,
    slots=0.9,
    # Published by Spector, Juravsky and others (Hazy Research, 2025): 1.3 µs for an empty kernel in a CUDA graph on an H100.
    gap=1.3e-6,
    # Assumed: no public measurement of it alone was found. llama.cpp's and SGLang's changes report 1 to 2 µs less a kernel.
    gap_dependent=0.4e-6,
    # Assumed: the next step's lists and its graph are queued already (docs/gpu.md), so only the device's own part counts.
    between_steps=5e-6,
)
