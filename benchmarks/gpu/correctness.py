"""Part one: every kernel and every case on a GPU, against float64, twice with the same bits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from smelt.runtime.kernels.kernel import Case, problem
from smelt.runtime.kernels.launch import Launch
from smelt.runtime.kernels.precompile import precompile, precompile_work
from smelt.runtime.kernels.registry import KERNELS
from smelt.runtime.kernels.targets import Target, target_of
from smelt.runtime.kernels.timing import device_lives

from .common import one_line, options, save

LIMIT_S = 210  # of the ten minutes that all parts may take


def main() -> None:
    """Check all cases; print those that are wrong; fail if there is one."""
    given = options(__doc__ or "")
    device = torch.device("cuda")
    target = target_of(device)
    todo = [
        (kernel, case) for kernel in KERNELS for case in kernel.cases if not case.targets or target.name in case.targets
    ]
    if given.quick:
        todo = [one for one in todo if not one[1].large][::3]
    start = time.monotonic()
    precompile(_launches([case for _, case in todo], target), print)
    # Attention's cases are small, so that drawing their inputs twice costs little.
    precompile_work(
        [partial(_compute, case, device) for kernel, case in todo if kernel.name.startswith("attend")], print
    )
    print(f"{torch.cuda.get_device_name()}: {len(todo)} cases, compiled in {time.monotonic() - start:.0f} s")
    results: list[dict[str, str | None]] = []
    reason = ""
    for kernel, case in todo:
        if not reason and time.monotonic() - start > LIMIT_S:
            reason = "not run: out of time"
        if reason:
            results.append({"kernel": kernel.name, "case": case.name, "problem": reason})
            continue
        try:
            found = problem(case, device, 1234)
        except Exception as error:
            found = one_line(error)
        results.append({"kernel": kernel.name, "case": case.name, "problem": found})
        if found:
            print(f"WRONG {kernel.name}, {case.name}: {found}", flush=True)
        if not device_lives():
            reason = "not run: the device had stopped"
            print(f"the device stopped in {kernel.name}, {case.name}")
    missing = sum(str(one["problem"]).startswith("not run") for one in results)
    right = sum(one["problem"] is None for one in results)
    wrong = len(results) - missing - right
    path = save(given, "correctness", results)
    print(f"{right} right, {wrong} wrong, {missing} not run, {time.monotonic() - start:.0f} s: {path}")
    sys.exit(1 if wrong or missing else 0)


def _launches(cases: list[Case], target: Target) -> Iterator[Launch]:
    for case in cases:
        if case.launch is not None:
            with suppress(Exception):  # which is told when the case is run
                yield case.launch(target)


def _compute(case: Case, device: torch.device) -> None:
    with suppress(Exception):
        case.prepare(device, torch.Generator(device).manual_seed(0)).compute()


if __name__ == "__main__":
    main()
