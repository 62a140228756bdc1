"""From what a launch has to do, and its code, to its time: each term by itself, so that one sees which binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .device import GpuFigures
from .machine_code import CodeCosts
from .work import Work


@dataclass(frozen=True)
class Ideas:
    """What could be done, to be switched on and off on paper.

    Attributes:
        dependent: programmatic dependent launch in every kernel; None for where the code has it.
        prefetch: with it, weights' first bytes are asked for before the wait.
        norm_inside: a norm before linears of few rows is computed by the linear.
    """

    dependent: bool | None = None
    prefetch: bool = False
    norm_inside: bool = False


@dataclass(frozen=True)
class Terms:
    """One launch's time in seconds. Its total is gap, start and tail, and the longest of the others.

    Attributes:
        gap: from the kernel before.
        start: instructions and reads before the first bytes are there.
        memory: bytes from memory, by what is on its way and the bandwidth.
        l2: bytes from the second-level cache.
        issue: instructions over issue slots.
        chain: one program's instructions, one after another.
        tensor: operations.
        tail: what follows the last bytes: sums of parts, the end of the code.
    """

    gap: float
    start: float
    memory: float
    l2: float
    issue: float
    chain: float
    tensor: float
    tail: float

    @property
    def bound(self) -> str:
        """Which of those that overlap is the longest."""
        names = ("memory", "l2", "issue", "chain", "tensor")
        return max(names, key=lambda name: getattr(self, name))

    @property
    def total(self) -> float:
        """All of it."""
        return self.gap + self.start + getattr(self, self.bound) + self.tail


def mean(terms: Sequence[Terms]) -> Terms:
    """Each term's mean."""
    return Terms(*(sum(getattr(one, field.name) for one in terms) / len(terms) for field in fields(Terms)))


def terms_of(work: Work, costs: CodeCosts | None, device: GpuFigures, ideas: Ideas, idle: float = 0.0) -> Terms:
    """Predict one launch.

    Args:
        work: what it has to do.
        costs: of its code; None for torch's own operators.
        device: where.
        ideas: what is assumed besides.
        idle: how long memory has had nothing to do when the launch before ends.
    """
    waits = early = False
    if costs is None:
        costs = _TORCH
    elif ideas.dependent is None:
        waits, early = costs.waits >= 0, costs.reads_early
    else:
        waits, early = ideas.dependent, ideas.dependent and ideas.prefetch
    cycle = 1 / device.clock
    per_unit = -(-work.programs // device.units)
    together = min(per_unit, costs.residents)
    of_scheduler = together * costs.warps / device.schedulers
    # Where no loop hides it, an instruction takes its latency, or its turn among the warps of a scheduler.
    alone = max(device.cycles, of_scheduler / device.slots) * cycle
    hidden = 0 if not waits else costs.waits if costs.waits >= 0 else costs.before
    # What was asked for before the wait is in the second-level cache, or on its way, when the kernel before has ended.
    first = min(work.reads, 1) if early else 0
    reads, l2_reads = work.reads - first, work.l2_reads + first
    gap = device.gap_dependent if waits else device.gap
    start = max(0, costs.before + work.extra - hidden) * alone + reads * device.first_read + l2_reads * device.l2_read
    waves = -(-work.programs // (costs.residents * device.units))
    length = 0 if costs.main is None else costs.main.length
    masked = 0 if costs.masked is None else costs.masked.length
    own = work.trips * length + work.partial * (masked or length) + work.scans * costs.scan
    # In later waves programs start and end while others multiply, which takes issue slots but no time of its own.
    all_waves = own * per_unit + (costs.before + costs.after) * (per_unit - together)
    rate = min(device.slots, max(1.0, of_scheduler) / device.cycles)
    depth = 0 if costs.main is None or costs.new_matrix else costs.main.depth
    one = max(own * device.cycles, (work.trips + work.partial) * depth * device.matrix_cycles)
    peak = device.tensor8 if work.bits == 8 else device.tensor16
    tail = costs.after * alone
    if work.shares > 1:
        # A sum is stored, then counted, then the others' are read.
        tail = costs.after_all * alone + 3 * device.l2_read
        tail += work.reduces * (device.l2_read + costs.reduce * alone)
        tail += max(work.sums / device.l2_bandwidth, work.last_sums / (device.unit_bytes * device.clock))
    return Terms(
        gap=gap,
        start=start,
        memory=_memory(work, costs.residents, device, idle + gap if early else 0.0),
        l2=work.l2 / min(device.l2_bandwidth, min(work.programs, device.units) * device.unit_bytes * device.clock),
        issue=max(all_waves * costs.warps / device.schedulers, own) / rate * cycle,
        chain=waves * one * cycle,
        tensor=work.operations / (peak * (1 if costs.new_matrix else device.tensor_old)),
        tail=tail,
    )


def _memory(work: Work, residents: int, device: GpuFigures, ahead: float) -> float:
    """Bytes over bandwidth, where Little's law allows it: what is on its way, over the time that it is on its way.

    ``ahead`` is how long before the launch before has ended the first programs ask for their first bytes.
    """
    if not work.memory:
        return 0.0
    most = device.bandwidth * device.achieved
    slots = residents * device.units
    waves, rest = divmod(work.programs, slots)
    there = min(work.memory, min(work.programs, slots) * work.in_flight, ahead * most)
    each = (work.memory - there) / work.programs
    found = waves * slots * each / min(most, slots * work.in_flight / device.loaded_read)
    if rest:
        found += rest * each / min(most, rest * work.in_flight / device.loaded_read)
    return found


def with_norm(work: Work, columns: int, rows: int, warps: int) -> Work:
    """A linear that norms its inputs itself: they are read once more, and each program norms all of them."""
    each = columns * rows // (32 * warps)
    return replace(work, l2_reads=work.l2_reads + 1, extra=work.extra + 60 + 5 * each)


_TORCH = CodeCosts(32, 0, 4, 16, 0, 0, 0, None, None, 0, 0, False, -1, False)
