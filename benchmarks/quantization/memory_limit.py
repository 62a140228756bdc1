"""Quantize a model whose weights are four times the memory that the process may have.

    python -m benchmarks.quantization.memory_limit [--limit-mb 700] [--rounding gptq]

A Llama-shaped model of random bfloat16 weights is written to the disk; then ``smelt run`` works on it
in a process whose data memory (RLIMIT_DATA: heap and private writable mappings, the interpreter's and
the libraries' included) is limited.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..common import parser, save
from ..random_model import SMALL, build


def measure(
    limit: int, rounding: str, scratch: Path, times: float = 4.0, windows: int = 4, scheme: str = "W4A16"
) -> dict[str, Any]:
    """Build a model of ``times`` the limit and quantize it under the limit."""
    blocks = -(-int(times * limit) // SMALL.block_bytes)
    weights = build(scratch / "model", blocks)
    recipe = {
        "model": str(scratch / "model"),
        "output": str(scratch / "out"),
        "calibrate": {"source": "builtin", "samples": windows, "length": 256},
        "steps": [{"quantize": {"scheme": scheme, "group_size": 128, "rounding": rounding}}],
        "evaluate": {"windows": windows, "length": 256, "speed": False},
    }
    (scratch / "recipe.yaml").write_text(json.dumps(recipe))
    plan = json.loads(_smelt(scratch, limit, "--dry-run", "--json").stdout)
    start = time.monotonic()
    done = _smelt(scratch, limit, "--json")
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"failed under the limit:\n{done.stderr}")
    original, compressed = json.loads(done.stdout)["report"]["models"]
    return {
        "rounding": rounding,
        "limit_bytes": limit,
        "weights_bytes": weights,
        "ratio": round(weights / limit, 2),
        "blocks": blocks,
        "seconds": round(seconds, 1),
        "predicted": plan["predicted"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "reload": compressed["reload"]["through"],
        "evaluation": {
            "perplexity_original": original["text"]["perplexity"],
            "perplexity_compressed": compressed["text"]["perplexity"],
            "kl": compressed["against"]["kl"],
            "top1_agreement": compressed["against"]["top1_agreement"],
            "computed_by": compressed["text"]["computed_by"],
        },
    }


def _smelt(scratch: Path, limit: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smelt.compress.cli", "run", str(scratch / "recipe.yaml"), *options],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--limit-mb", type=int, default=700)
    options.add_argument("--rounding", default="gptq")
    options.add_argument("--no-save", action="store_true")
    chosen = options.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="smelt-memory-"))
    try:
        row = measure(chosen.limit_mb * 1_000_000, chosen.rounding, scratch)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(row, indent=1))
    if not chosen.no_save:
        print(
            save(
                "memory_limit",
                f"python -m benchmarks.quantization.memory_limit --limit-mb {chosen.limit_mb} --rounding {chosen.rounding}",
                row,
            )
        )


if __name__ == "__main__":
    main()
