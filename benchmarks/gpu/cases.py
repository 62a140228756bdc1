"""The kernels' own cases as jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from smelt.runtime.kernels.base.kernel import Case, Kernel, problem
from smelt.runtime.kernels.base.targets import target_of
from smelt.runtime.kernels.tools.registry import KERNELS

from .job import Job, Row
from .place import Place


def listed(place: Place, *, large: bool | None = None) -> list[tuple[Kernel, Case]]:
    """The cases that are for this device; a rehearsal tries the first small one of each kernel."""
    target = target_of(place.device)
    found = [
        (kernel, case)
        for kernel in KERNELS
        for case in kernel.cases
        if (not case.targets or target.name in case.targets) and (large is None or case.large == large)
    ]
    if place.rehearses:
        first = {kernel.name: (kernel, case) for kernel, case in reversed(found) if not case.large}
        return list(reversed(first.values()))
    return found[::10] if place.quick else found


def cases_of(place: Place, *, large: bool) -> list[Job]:
    """A job for each."""
    names = [f"{kernel.name}: {case.name}" for kernel, case in listed(place, large=large)]
    assert len(set(names)) == len(names), "two cases share a name"
    return [
        Job(name, partial(_check, case), limit_s=60)
        for name, (_, case) in zip(names, listed(place, large=large), strict=True)
    ]


def _check(case: Case, place: Place) -> Iterator[Row]:
    # Programs of a split product, of one sequence's attention and of a row that the last one rounds meet in another order each
    # time; two runs that agree prove little.
    yield {"problem": problem(case, place.device, 1234, place.runs)}
