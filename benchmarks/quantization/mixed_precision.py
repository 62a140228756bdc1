"""Formats chosen part by part beside one format everywhere, at equal bits; and predicted beside measured speed.

    python -m benchmarks.quantization.mixed_precision

Quality: the builtin smelt-6m, calibrated on 64 windows of 256 tokens of the builtin corpus that three seeds draw, and
evaluated on the corpus's other half. Speed: a Llama shape with random weights, decoding one request.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.runtime.measure.step_time import step_seconds

from ..common import ResultRows, parser
from ..random_model import SMALL, build

SEEDS = (0, 1, 2)
GROUP = 64
FINER: list[dict[str, Any]] = [
    {"scheme": scheme, "group_size": group}
    for scheme, groups in (("W2A16", (64,)), ("W3A16", (32, 64, 128)), ("W4A16", (32, 64, 128)), ("W8A16", (128,)))
    for group in groups
]
COMMAND = "python -m benchmarks.quantization.mixed_precision"
# Turns of original and compressed model; the medians of their steps are compared.
TURNS = 5


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=("speed", "quality"), help="measure only this; the other's results stay")
    options.add_argument("--blocks", type=int, default=6, help="of the model that speed is measured on")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for part, measure in (("speed", speeds), ("quality", qualities)):
            if asked.part in (None, part):
                rows = ResultRows("mixed_precision", COMMAND, part)
                rows.clear()
                for row in measure(scratch, asked.blocks):
                    rows.add(row)


def speeds(scratch: str, blocks: int) -> Iterator[dict[str, Any]]:
    """A row for each target of speed."""
    model = Path(scratch) / "model"
    build(model, blocks, SMALL)
    for target in (1.5, 2.0):
        yield speed(scratch, model, target)


def qualities(scratch: str, _: int) -> Iterator[dict[str, Any]]:
    """A row for each seed and number of bits."""
    for seed in SEEDS:
        for scheme in ("W3A16", "W4A16"):
            uniform = quality(scratch, seed, {"scheme": scheme})
            target = {"bits": round(uniform["bits_per_weight"] + 5e-5, 4)}
            chosen = quality(scratch, seed, {"scheme": "auto", "target": target})
            finer = quality(scratch, seed, {"scheme": "auto", "target": target, "candidates": FINER})
            yield {"seed": seed, "uniform": uniform, "auto": chosen, "auto, several group sizes": finer}


def quality(scratch: str, seed: int, quantize: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    recipe = Recipe.model_validate(
        {
            "model": "builtin:smelt-6m",
            "output": f"{scratch}/out",
            "seed": seed,
            "calibrate": {"samples": 64, "length": 256},
            "steps": [{"quantize": {"group_size": GROUP, "rounding": "gptq", **quantize}}],
            "evaluate": {"windows": 64, "length": 256, "samples": 0, "speed": False},
        }
    )
    result = run(recipe, fresh=True)
    original, compressed = result.report.as_data()["models"]
    chosen = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0].get("chosen")
    return {
        "scheme": quantize["scheme"],
        "bits_per_weight": compressed["size"]["linear_bits_per_weight"],
        "kl": compressed["against"]["kl"],
        "perplexity": compressed["text"]["perplexity"],
        "perplexity_original": original["text"]["perplexity"],
        **({} if chosen is None else {"predicted_kl": chosen["predicted_kl"], "schemes": _counted(chosen)}),
    }


def speed(scratch: str, model: Path, target: float) -> dict[str, Any]:
    """One target: what was predicted, and what the checkpoint then does."""
    recipe = Recipe.model_validate(
        {
            "model": str(model),
            "output": f"{scratch}/fast",
            "calibrate": {"samples": 8, "length": 64},
            "steps": [{"quantize": {"scheme": "auto", "group_size": GROUP, "target": {"speedup": target}}}],
            "evaluate": False,
        }
    )
    checkpoint = run(recipe, fresh=True).checkpoint
    chosen = json.loads((checkpoint / "smelt.json").read_text())["steps"][0]["chosen"]
    ratios = [step_seconds(model, str) / step_seconds(checkpoint, str) for _ in range(TURNS)]
    return {
        "target": target,
        "predicted": chosen["predicted_speedup"],
        "measured": statistics.median(ratios),
        "measured_each": ratios,
        "bits_per_weight": chosen["bits_per_weight"],
        "schemes": _counted(chosen),
    }


def _counted(chosen: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for unit in chosen["units"]:
        counts[unit["scheme"]] = counts.get(unit["scheme"], 0) + unit["linears"]
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    main()
