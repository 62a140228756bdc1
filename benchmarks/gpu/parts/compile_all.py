"""Compiles what the cases launch on all processors, before anything is launched; later processes find it in Triton's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from smelt.runtime.kernels.base.kernel import Case
from smelt.runtime.kernels.base.launch import Launch
from smelt.runtime.kernels.base.precompile import precompile, precompile_work
from smelt.runtime.kernels.base.targets import target_of

from ..cases import listed
from ..job import Job, Row
from ..place import Place


def jobs(_: Place) -> list[Job]:
    """Small cases, then large ones."""
    return [
        Job("compile small cases", partial(_compile, large=False), limit_s=200),
        Job("compile large cases", partial(_compile, large=True), limit_s=200),
    ]


def _compile(place: Place, *, large: bool) -> Iterator[Row]:
    target, found = target_of(place.device), [case for _, case in listed(place, large=large)]
    messages = list[str]()

    def launches() -> Iterator[Launch]:
        for case in found:
            if case.launch is not None:
                with suppress(Exception):  # which the case's own job reports
                    yield case.launch(target)

    # Those without a launch of their own are attention's, which are small: drawing their inputs costs little.
    works = [partial(_compute, case, place.device) for case in found if case.launch is None and not case.large]
    if not place.rehearses:  # an interpreter compiles nothing
        precompile(launches(), messages.append)
        precompile_work(works, messages.append)
    yield {"cases": len(found), "message": messages[-1] if messages else ""}


def _compute(case: Case, device: torch.device) -> None:
    with suppress(Exception):
        case.prepare(device, torch.Generator(device).manual_seed(0)).compute()
