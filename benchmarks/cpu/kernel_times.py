"""How long linears of codes take with the kernels of the `smelt` that Python finds, and a digest of what they give; printed as JSON.

    python benchmarks/cpu/kernel_times.py ROWS...

`two_checkouts.py` runs it for two of them, so it uses nothing of `benchmarks`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time

import torch
from smelt.runtime.native import library
from smelt.runtime.native.linears import CodesLinear
from smelt.runtime.weights.matrix import Matrix

SHAPES = ((10240, 2048), (4096, 5632))  # about 20 million codes each, which no cache holds
GROUP = 128
TIMES, CALLS = 7, 3


def linears(outputs: int, columns: int) -> dict[str, CodesLinear]:
    """Each kind of codes, with int8 inputs and with those of 16 bits."""
    kernels = library.kernels(lambda text: print(text, file=sys.stderr))
    if kernels is None:
        raise SystemExit("this machine cannot run the compiled kernels")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (outputs, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(outputs, columns // GROUP, generator=generator) * 0.01).bfloat16()
    eight, four = Matrix(codes, "int8", 8, scale), Matrix(codes >> 4, "int4", 4, scale)
    found = {}
    for exact in (False, True):
        inputs = "inputs of 16 bits" if exact else "int8 inputs"
        planes = CodesLinear(kernels, eight, None, exact, few_exact=exact, planes=True)
        found[f"8 bits, {inputs}"] = CodesLinear(kernels, eight, None, exact, few_exact=exact)
        found[f"8 bits in two planes, {inputs}"] = planes
        found[f"4 bits, {inputs}"] = CodesLinear(kernels, four, None, exact, few_exact=exact)
        if not exact:
            upper = planes.upper()
            assert upper is not None
            found[f"upper 4 of 8 bits, {inputs}"] = upper
    return found


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    counts = [int(each) for each in sys.argv[1:]]
    digest, times = hashlib.sha256(), []
    for outputs, columns in SHAPES:
        generator = torch.Generator().manual_seed(1)
        inputs = {rows: torch.randn(rows, columns, generator=generator).bfloat16() for rows in counts}
        kinds = linears(outputs, columns)
        taken: dict[tuple[str, int], list[float]] = {(kind, rows): [] for kind in kinds for rows in counts}
        for turn in range(TIMES):
            for (kind, rows), each in taken.items():
                given = inputs[rows]
                begun = time.perf_counter()
                for _ in range(CALLS):
                    given = kinds[kind](inputs[rows])
                each.append((time.perf_counter() - begun) / CALLS)
                if turn == 0:
                    digest.update(given.view(torch.int16).numpy().tobytes())
        times += [
            {"columns": columns, "kind": kind, "rows": rows, "seconds": statistics.median(each)}
            for (kind, rows), each in taken.items()
        ]
    print(json.dumps({"digest": digest.hexdigest(), "times": times}))


if __name__ == "__main__":
    main()
