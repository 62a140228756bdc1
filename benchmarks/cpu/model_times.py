"""How long models take for a prompt and for tokens with the `smelt` that Python finds, and a digest of the tokens; printed as JSON.

    python benchmarks/cpu/model_times.py NAME=CHECKPOINT...

`two_checkouts.py` runs it for two of them, so it uses nothing of `benchmarks`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from typing import Any

import torch
from smelt.runtime import Engine, SamplingParams

TIMES = 3
PROMPT = 512
SHORT, TOKENS = 16, 32  # prompts and answers where generating is timed
SEQUENCES = (1, 8)


def loads() -> dict[str, tuple[list[list[int]], int]]:
    """Prompts of tokens that every vocabulary has, and how many tokens follow each."""
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(5, 250, (count, length), generator=generator).tolist()

    generating = {f"{count} at once": (prompts(count, SHORT), TOKENS) for count in SEQUENCES}
    return {f"a prompt of {PROMPT}": (prompts(1, PROMPT), 1), **generating}


def main() -> None:
    """Measure and print."""
    digest = hashlib.sha256()
    times: list[dict[str, Any]] = []
    for each in sys.argv[1:]:
        name, _, path = each.partition("=")
        engine = Engine(
            path, quiet=True, max_model_len=PROMPT + TOKENS, max_num_seqs=max(SEQUENCES), enable_prefix_caching=False
        )
        taken: dict[str, list[float]] = {}
        for turn in range(TIMES + 1):
            for load, (prompts, count) in loads().items():
                begun = time.perf_counter()
                outputs = engine.generate(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
                if turn:  # the first one warms up
                    taken.setdefault(load, []).append(time.perf_counter() - begun)
                digest.update(repr([output.outputs[0].token_ids for output in outputs]).encode())
        engine.close()
        times += [{"model": name, "load": load, "seconds": statistics.median(found)} for load, found in taken.items()]
    print(json.dumps({"digest": digest.hexdigest(), "times": times}))


if __name__ == "__main__":
    main()
