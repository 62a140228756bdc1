"""Part one: every kernel and every case on a GPU, against float64, twice with the same bits."""

from __future__ import annotations

import sys
import time

import torch
from smelt.runtime.kernels.kernel import problem
from smelt.runtime.kernels.registry import KERNELS
from smelt.runtime.kernels.targets import target_of

from .common import options, precompile, save

LIMIT_S = 240  # of the nine minutes that both parts may take


def main() -> None:
    """Check all cases; print those that are wrong; fail if there is one."""
    given = options(__doc__ or "")
    device = torch.device("cuda")
    target = target_of(device)
    todo = [
        (kernel, place, case)
        for kernel in KERNELS
        for place, case in enumerate(kernel.cases)
        if not case.targets or target.name in case.targets
    ]
    if given.quick:
        todo = [one for one in todo if not one[2].large][::3]
    start = time.monotonic()
    precompile([(kernel.name, place) for kernel, place, case in todo if case.launch is not None])
    print(f"{torch.cuda.get_device_name()}: {len(todo)} cases, compiled in {time.monotonic() - start:.0f} s")
    results, wrong, skipped = [], 0, 0
    for kernel, _, case in todo:
        if time.monotonic() - start > LIMIT_S:
            skipped += 1
            results.append({"kernel": kernel.name, "case": case.name, "problem": "not run: out of time"})
            continue
        try:
            found = problem(case, device, 1234)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        torch.cuda.empty_cache()
        results.append({"kernel": kernel.name, "case": case.name, "problem": found})
        if found:
            wrong += 1
            print(f"WRONG {kernel.name}, {case.name}: {found}")
            if "CUDA error" in found or "illegal" in found:
                print("the device stopped; what follows was not run")
                break
    path = save(given.output, "correctness", results)
    right = len(results) - wrong - skipped
    print(
        f"{right} right, {wrong} wrong, {len(todo) - right - wrong} not run, {time.monotonic() - start:.0f} s: {path}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
