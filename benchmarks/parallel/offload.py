"""Generate with a model whose weights are four times the memory that the process may have, from the disk.

    python -m benchmarks.parallel.offload [--limit-mb 700] [--turns 5]

A Llama-shaped model of random bfloat16 weights is written. A process whose data memory (RLIMIT_DATA: heap and private writable mappings,
the interpreter's and the libraries' included) is limited loads it with ``offload="disk"``; one without a limit loads it as usual; both
generate greedily from the same prompts, by turns. Without offload the limited process must refuse the model.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..common import parser, save
from ..random_model import SMALL, build

_PROMPT, _OUTPUT = 16, 8
_LOADS = (1, 32)


def generate(model: Path, *, offloads: bool) -> dict[str, Any]:
    """What one process generates, and how fast."""
    from smelt.runtime import Engine, SamplingParams

    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": max(_LOADS), "kv_cache_memory_bytes": 64 << 20}
    engine = Engine(model, offload="disk" if offloads else None, quiet=True, enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)
    found: dict[str, Any] = {}
    for count in _LOADS:
        prompts = [[5 + (31 * i + j) % 4000 for j in range(_PROMPT)] for i in range(count)]
        before = None if engine.model.stream is None else engine.model.stream.counts.as_data()
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - begun
        row: dict[str, Any] = {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "tokens_per_second": count * _OUTPUT / seconds,
        }
        if engine.model.stream is not None and before is not None:
            spent = {key: value - before[key] for key, value in engine.model.stream.counts.as_data().items()}
            row |= {
                "bandwidth": spent["bytes"] / spent["reading"],
                "waiting": spent["waiting"] / (spent["waiting"] + spent["computing"]),
                "predicted_bandwidth": engine.model.stream.predicted,
            }
        found[str(count)] = row
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "loads": found,
        "sentence": engine.offload_sentence(),
        "anonymous_memory": int(status["RssAnon"].split()[0]) * 1024,
    }


def _child(model: Path, *options: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "benchmarks.parallel.offload", "--child", str(model), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)


def measure(limit: int, turns: int, scratch: Path) -> dict[str, Any]:
    """Build the model and generate, with and without the limit."""
    blocks = -(-4 * limit // SMALL.block_bytes)
    weights = build(scratch / "model", blocks)
    refused = _child(scratch / "model", limit=limit)
    assert refused.returncode, "without offload it must not fit"
    runs: dict[str, list[dict[str, Any]]] = {"in memory": [], "offloaded": []}
    for _ in range(turns):
        for name, options, most in (("in memory", (), None), ("offloaded", ("--offload",), limit)):
            done = _child(scratch / "model", *options, limit=most)
            if done.returncode:
                raise SystemExit(done.stderr)
            runs[name].append(json.loads(done.stdout))
            print(
                name,
                {key: {k: v for k, v in row.items() if k != "tokens"} for key, row in runs[name][-1]["loads"].items()},
                flush=True,
            )
    tokens = [[row.pop("tokens") for row in run["loads"].values()] for each in runs.values() for run in each]
    medians = {
        name: {
            count: {key: statistics.median(run["loads"][count][key] for run in each) for key in each[0]["loads"][count]}
            for count in each[0]["loads"]
        }
        for name, each in runs.items()
    }
    return {
        "limit": limit,
        "weights": weights,
        "refused": refused.stderr.strip().splitlines()[-1],
        "same_tokens": all(each == tokens[0] for each in tokens),
        "medians": medians,
        "sentence": runs["offloaded"][-1]["sentence"],
        "anonymous_memory": max(run["anonymous_memory"] for run in runs["offloaded"]),
        "turns": turns,
    }


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--limit-mb", type=int, default=700)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--child", type=Path)
    options.add_argument("--offload", action="store_true")
    given = options.parse_args()
    if given.child is not None:
        print(json.dumps(generate(given.child, offloads=given.offload)))
        return
    with tempfile.TemporaryDirectory(prefix="smelt-offload-") as scratch:
        found = measure(given.limit_mb * 1_000_000, given.turns, Path(scratch))
    print(json.dumps(found, indent=1))
    print(save("offload", f"python -m benchmarks.parallel.offload --limit-mb {given.limit_mb}", found))


if __name__ == "__main__":
    main()
