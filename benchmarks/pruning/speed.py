"""How much of the operations that pruning removes is gone from the time, on the CPU engine: each shape beside the whole one.

    python -m benchmarks.pruning.speed

Shapes of smelt-6m and of a Llama of 1.1 billion parameters (2048 channels, 22 blocks, 32 heads of queries and 4 of keys
and values, 5632 feed-forward channels, 32000 tokens), bfloat16. Weights do not matter for the time, so they are arbitrary. Two steps:
one token for one sequence of 256, and a prompt of 256 tokens. Medians of nine rounds in which both take turns. Operations are those of
all linears, the head once. Machines differ: the ratio is the time removed over the operations removed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from smelt.models.directory.directory import ModelDirectory
from smelt.models.directory.find import find_model
from smelt.models.structure.open_model import OpenModel
from smelt.prune.structure.axes import feed_forward, heads, hidden
from smelt.prune.structure.drop_blocks import drop_blocks
from smelt.prune.structure.slice_width import slice_width
from smelt.runtime.measure.shape_time import ModelShape, decode_seconds, prompt_seconds

from ..common import parser, save
from ..random_model import RandomShape, build

NAME = "pruning_speed"
AXES = {"ffn": feed_forward, "heads": heads, "hidden": hidden}
CASES: list[dict[str, float]] = [
    {"blocks": 0.5},
    {"ffn": 0.25},
    {"ffn": 0.5},
    {"heads": 0.5},
    {"hidden": 0.25},
    {"hidden": 0.5},
    {"blocks": 0.5, "ffn": 0.5},
    {"hidden": 0.25, "heads": 0.5, "ffn": 0.5},
]


def main() -> None:
    parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in (("smelt-6m", find_model("builtin:smelt-6m")), ("1.1B shape", _large(Path(scratch)))):
            model = OpenModel(directory)
            for case in CASES:
                rows.append({"model": name, "removed": case, **measure(model, _smaller(model, case))})
                print(rows[-1], flush=True)
                save(NAME, "python -m benchmarks.pruning.speed", rows)


def measure(whole: OpenModel, small: OpenModel) -> dict[str, Any]:
    """One row: operations and times removed, as shares."""
    shapes = [_shape(each) for each in (whole, small)]
    quiet: dict[str, Any] = {"dtype": torch.bfloat16, "log": lambda _: None}
    found: dict[str, Any] = {}
    for step, head, (before, after) in (
        ("decode", 1.0, decode_seconds(shapes, batch=1, context=256, **quiet)),
        ("prompt", 1 / 256, prompt_seconds(shapes, tokens=256, **quiet)),
    ):
        operations = 1 - _operations(small, head) / _operations(whole, head)
        gone = 1 - after / before
        found[step] = {
            "milliseconds": [round(1e3 * before, 3), round(1e3 * after, 3)],
            "operations_removed": round(operations, 3),
            "time_removed": round(gone, 3),
            "ratio": round(gone / operations, 2),
        }
    return found


def _large(scratch: Path) -> ModelDirectory:
    shape = RandomShape(
        hidden=2048, wide=5632, heads=32, key_value_heads=4, vocabulary=32000, tied=False, positions=2048
    )
    build(scratch / "large", 22, shape)
    return ModelDirectory("1.1B shape", scratch / "large")


def _smaller(model: OpenModel, case: dict[str, float]) -> OpenModel:
    for name, ratio in case.items():
        if name == "blocks":
            depth = len(model.anatomy.blocks)
            model = drop_blocks(model, range(round(depth * (1 - ratio)), depth))
        else:
            axis = AXES[name](model)
            model = slice_width(model, axis, axis.left(ratio))
    return model


def _shape(model: OpenModel) -> ModelShape:
    return ModelShape(model.config, {name: model.weights.info(name).shape for name in model.weights.names()})


def _operations(model: OpenModel, head: float) -> float:
    return sum(f.numel * (head if name == model.anatomy.head else 1.0) for name, f in model.linears.items())


if __name__ == "__main__":
    main()
