"""Quantize a model whose weights are four times the memory that the process may have.

    python -m benchmarks.memory_limit [--limit-mb 700] [--rounding gptq]

A Llama-shaped model of random bfloat16 weights is written to the disk; then ``smelt run`` works on it
in a process whose data memory (RLIMIT_DATA: heap and private writable mappings, the interpreter's and
the libraries' included) is limited.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from smelt.compress.checkpoint import write_checkpoint
from smelt.compress.safetensors_file import TensorInfo

from .common import REPOSITORY, save

HIDDEN, WIDE, VOCABULARY, HEADS, KV_HEADS = 1024, 3072, 4096, 16, 4
BLOCK_BYTES = 2 * (HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN * KV_HEADS // HEADS * 2 + 3 * HIDDEN * WIDE)


def build(directory: Path, blocks: int) -> int:
    """Write a model of ``blocks`` random blocks, with smelt-6m's tokenizer; returns its bytes."""
    tokenizer = REPOSITORY / "compress" / "builtin" / "smelt-6m"
    config = json.loads((tokenizer / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(blocks):
        at = f"model.layers.{i}."
        kv = HIDDEN * KV_HEADS // HEADS
        shapes |= {at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN)}
        shapes |= {at + f"self_attn.{n}_proj.weight": (kv, HIDDEN) for n in "kv"}
        shapes |= {at + f"mlp.{n}_proj.weight": (WIDE, HIDDEN) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (HIDDEN, WIDE)}
        shapes |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)}

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(hash_of(name))
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16) / shape[1] ** 0.5

    entries = [
        (name, TensorInfo(torch.bfloat16, shape), lambda name=name, shape=shape: random(name, shape))
        for name, shape in shapes.items()
    ]
    write_checkpoint(directory, tokenizer, config, entries, shard_bytes=500_000_000)
    return sum(info.nbytes for _, info, _ in entries)


def hash_of(name: str) -> int:
    """A seed that does not change from run to run."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % (1 << 31)


def measure(limit: int, rounding: str, scratch: Path, times: float = 4.0, windows: int = 4) -> dict[str, Any]:
    """Build a model of ``times`` the limit and quantize it under the limit."""
    blocks = -(-int(times * limit) // BLOCK_BYTES)
    weights = build(scratch / "model", blocks)
    recipe = {
        "model": str(scratch / "model"),
        "output": str(scratch / "out"),
        "calibrate": {"source": "builtin", "samples": windows, "length": 256},
        "steps": [{"quantize": {"scheme": "W4A16", "group_size": 128, "rounding": rounding}}],
        "evaluate": {"windows": windows, "length": 256},
    }
    (scratch / "recipe.yaml").write_text(json.dumps(recipe))
    plan = json.loads(_smelt(scratch, limit, "--dry-run", "--json").stdout)
    start = time.monotonic()
    done = _smelt(scratch, limit, "--json")
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"failed under the limit:\n{done.stderr}")
    report = json.loads(done.stdout)["report"]
    return {
        "rounding": rounding,
        "limit_bytes": limit,
        "weights_bytes": weights,
        "ratio": round(weights / limit, 2),
        "blocks": blocks,
        "seconds": round(seconds, 1),
        "predicted": plan["predicted"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "reload": report["reload"]["through"],
        "evaluation": report["evaluation"],
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=700)
    parser.add_argument("--rounding", default="gptq")
    parser.add_argument("--no-save", action="store_true")
    chosen = parser.parse_args()
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
                f"python -m benchmarks.memory_limit --limit-mb {chosen.limit_mb} --rounding {chosen.rounding}",
                row,
            )
        )


if __name__ == "__main__":
    main()
