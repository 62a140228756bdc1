"""Generating beside a process that keeps one core busy: tokens a second with each number of threads, quiet and disturbed.

    python -m benchmarks.cpu.busy_neighbour CHECKPOINT [--repeats 5] [--rounds 3]

The neighbour is a loop without end, pinned to the last core. Quiet and disturbed turns alternate, since a machine's
memory has its moods; of each the median is kept:

- ``decode``: greedy tokens of one request after a prompt of 128, a second
- ``decode_8``: of eight requests side by side
- ``prefill``: a prompt of 512 tokens, over the time to the first token
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..common import REPOSITORY, parser, save

GENERATED = 48


@contextlib.contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that takes as much of a core as the system gives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    )
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()


def measure(checkpoint: str, threads: int, repeats: int) -> dict[str, float]:
    """Rates in this process, under names like ``decode quiet``."""
    from smelt.runtime import Engine, SamplingParams

    torch.set_num_threads(threads)
    engine = Engine(checkpoint, enable_prefix_caching=False, max_model_len=1024, max_num_seqs=8, quiet=True)
    generator = torch.Generator().manual_seed(0)

    def generate(prompt: int, tokens: int, requests: int = 1) -> float:
        """Seconds after the prompts, if more than one token is wanted, or of the prompts."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        for _ in range(requests):
            ids = torch.randint(4, engine.model.spec.vocabulary, (prompt,), generator=generator)
            engine.add_request(ids.tolist(), params)
        begun = time.perf_counter()
        if tokens > 1:
            while len(engine.step()) < requests:
                pass
            begun = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - begun

    def turn() -> dict[str, float]:
        return {
            "decode": (GENERATED - 1) / generate(128, GENERATED),
            "decode_8": 8 * (GENERATED - 1) / generate(16, GENERATED, requests=8),
            "prefill": 512 / generate(512, 1),
        }

    turn()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, rate in turn().items():
            found[f"{name} quiet"].append(rate)
        with neighbour(max(os.sched_getaffinity(0))):
            for name, rate in turn().items():
                found[f"{name} disturbed"].append(rate)
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    """Measure, print a table and save it."""
    options = parser(__doc__)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--rounds", type=int, default=3, help="processes for each number of threads")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        print(json.dumps(measure(str(arguments.checkpoint), arguments.worker, arguments.repeats)))
        return
    counts = range(1, len(os.sched_getaffinity(0)) + 1)
    rates: dict[str, dict[str, list[float]]] = {f"{n} threads": defaultdict(list) for n in counts}
    for _ in range(arguments.rounds):
        for n in counts:
            command = [sys.executable, "-m", "benchmarks.cpu.busy_neighbour", str(arguments.checkpoint)]
            command += ["--worker", str(n), "--repeats", str(arguments.repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
            for name, rate in json.loads(done.stdout.strip().splitlines()[-1]).items():
                rates[f"{n} threads"][name].append(rate)
    results: dict[str, Any] = {
        threads: {name: statistics.median(each) for name, each in found.items()} for threads, found in rates.items()
    }
    names = list(results["1 threads"])
    print(f"{'tokens/s':<22}" + "".join(f"{threads:>12}" for threads in results))
    for name in names:
        print(f"{name:<22}" + "".join(f"{found[name]:>12.1f}" for found in results.values()))
    results["model"] = arguments.checkpoint.parent.name
    save("busy_neighbour", "python -m benchmarks.cpu.busy_neighbour CHECKPOINT", results)


if __name__ == "__main__":
    main()
