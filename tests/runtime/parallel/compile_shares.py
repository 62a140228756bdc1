"""Compiles what a rank of a divided model launches, for every kind of GPU. Run without Triton's interpreter: it prints a JSON line
for each case, with how many kernels were compiled and what failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from smelt.quant.scheme import resolve
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.batch import Run
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.kernels.base.launch import Launch, noted
from smelt.runtime.kernels.base.precompile import identity
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import tiles_of_target
from smelt.runtime.kernels.tools.check import compiled
from smelt.runtime.measure.random_checkpoint import write_random_checkpoint
from smelt.runtime.parallel.ranks import Ranks
from smelt.runtime.weights.checkpoint import Checkpoint
from transformers import LlamaConfig

# Llama 3 8B's layers, and a small vocabulary.
CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, vocab_size=2048
)  # fmt: skip


@dataclass
class LonelyRank(Ranks):
    """The first of several ranks; nothing comes from the others."""

    count: int  # type: ignore[assignment]


def launches(path: Path, ranks: int, target: str) -> dict[tuple[object, ...], Launch]:
    """What differs in compilation, of a prompt, single tokens, and both."""
    operators = GpuOperators(torch.bfloat16, torch.device("cpu"))
    operators._tiles = tiles_of_target(TARGETS[target])
    model = Model(Checkpoint(path), operators, ranks=LonelyRank(ranks))
    assert model.stack is not None
    found: dict[tuple[object, ...], Launch] = {}
    for kept in (torch.bfloat16, torch.int8):
        store = model.keys_values(16, 16, kept)
        prompt, single = Run([5] * 100, 0, list(range(7)), 128, 1), Run([5], 20, [8, 9], 128, 1)
        for runs in ([prompt], [single], [single] * 3 + [prompt]):
            with noted(lambda launch: found.setdefault(identity(launch), launch)):
                model.hidden(model.batch(runs, 16), store)
    return found


def main() -> None:
    """Every case of the arguments: a scheme, or none, and numbers of ranks."""
    scheme, *counts = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        write_random_checkpoint(path, CONFIG, None if scheme == "none" else resolve(scheme, None))
        for ranks in map(int, counts):
            for name, target in TARGETS.items():
                found = launches(path, ranks, name)
                failed = []
                for launch in found.values():  # one after another: Python's ast is not for several threads
                    try:
                        compiled(launch, target)
                    except Exception as error:
                        failed.append(f"{launch.function.fn.__name__}: {type(error).__name__}: {error}"[:300])
                print(
                    json.dumps({"target": name, "ranks": ranks, "compiled": len(found), "failed": failed}), flush=True
                )


if __name__ == "__main__":
    main()
