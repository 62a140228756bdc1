"""What ``Engine(reproducible=True)`` costs: tokens a second with and without it, in turns, one process.

    python -m benchmarks.cpu.reproducible NAME=CHECKPOINT... [--repeats 5]

Of each load the median is kept: prompts of 512 and 2,048 tokens, 24 tokens after a prompt of 128, and 16 tokens each of eight requests.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from smelt.runtime import Engine, SamplingParams

from ..common import parser, save

# Tokens of a prompt, requests at once, and tokens to generate after the first.
LOADS = {
    "prompt of 512": (512, 1, 0),
    "prompt of 2048": (2048, 1, 0),
    "decode at 128": (128, 1, 24),
    "decode, 8 requests": (32, 8, 16),
}


def seconds(engine: Engine, prompt: int, requests: int, generated: int) -> float:
    """What one load takes; for generating, without its prompts."""
    vocabulary = engine.model.spec.vocabulary
    prompts = [[(7 * i + 13 * j) % (vocabulary - 10) + 5 for j in range(prompt)] for i in range(requests)]

    def taken(tokens: int) -> float:
        begun = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - begun

    return taken(1 + generated) - (taken(1) if generated else 0)


def measure(checkpoint: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens a second of each load, and the time with the promise over the time without."""
    engines = [
        Engine(
            checkpoint,
            reproducible=each,
            max_num_seqs=8,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
            quiet=True,
        )
        for each in (False, True)
    ]
    found = {}
    for name, load in LOADS.items():
        taken: list[list[float]] = [[], []]
        for repeat in range(repeats + 1):
            for i, engine in enumerate(engines):
                each = seconds(engine, *load)
                if repeat:  # the first one warms up
                    taken[i].append(each)
        usual, promised = map(statistics.median, taken)
        tokens = load[1] * load[2] or load[0]
        found[name] = {"usual": tokens / usual, "reproducible": tokens / promised, "time": promised / usual}
    return found


def main() -> None:
    """Measure, print, and keep."""
    options = parser(__doc__)
    options.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    options.add_argument("--repeats", type=int, default=5)
    arguments = options.parse_args()
    results = {}
    for entry in arguments.checkpoints:
        name, _, path = entry.partition("=")
        results[name] = measure(Path(path), arguments.repeats)
        for load, row in results[name].items():
            print(
                f"{name:<10}{load:<22}{row['usual']:8.1f}{row['reproducible']:8.1f} tokens/s, time x {row['time']:.2f}",
                flush=True,
            )
    save("reproducible", "python -m benchmarks.cpu.reproducible NAME=CHECKPOINT...", results)


if __name__ == "__main__":
    main()
