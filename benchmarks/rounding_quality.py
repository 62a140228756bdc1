"""Perplexity and divergence of nearest, HQQ and GPTQ on two trained models, over real text.

    python -m benchmarks.rounding_quality

For GPTQ, calibration windows are drawn by three seeds; nearest and HQQ do not read them. "plain scales" is
GPTQ as published, with scales from the extremes of each group; Smelt's default is to search them, but for
4 bits in groups of 64 and less. Needs ../shared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run

from .common import SHARED, save

SEEDS = (0, 1, 2)
METHODS: dict[str, Any] = {
    "nearest": "nearest",
    "hqq": "hqq",
    "gptq, plain scales": {"method": "gptq", "scale_search": False},
    "gptq, searched scales": {"method": "gptq", "scale_search": True},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        stories = json.loads((SHARED / "data/text/tinystories_1000.json").read_text())
        texts = [story if isinstance(story, str) else story.get("story", story.get("text")) for story in stories]
        held_out = Path(scratch) / "stories.txt"
        held_out.write_text("\n\n".join(texts[900:]))
        rows = []
        for bits in (4, 3, 2):
            for group in (128, 64):
                rows += measure(
                    scratch,
                    "builtin:smelt-6m",
                    bits,
                    group,
                    "calib/c4.utf8",
                    SHARED / "data/text/wikitext2_test_unk.txt",
                )
            rows += measure(
                scratch, str(SHARED / "models/stories260K"), bits, -1, "text/tinystories_sample_exllamav2.txt", held_out
            )
            save("rounding_quality", "python -m benchmarks.rounding_quality", rows)


def measure(
    scratch: str, model: str, bits: int, group: int, calibration: str, evaluation: Path
) -> list[dict[str, Any]]:
    """One model, one format: every method."""
    rows = []
    for name, rounding in METHODS.items():
        found = []
        for seed in SEEDS if name.startswith("gptq") else SEEDS[:1]:
            recipe = Recipe.model_validate(
                {
                    "model": model,
                    "output": f"{scratch}/out",
                    "seed": seed,
                    "calibrate": {"source": str(SHARED / "data" / calibration), "samples": 128, "length": 256},
                    "steps": [{"quantize": {"scheme": f"W{bits}A16", "group_size": group, "rounding": rounding}}],
                    "evaluate": {"text": str(evaluation), "windows": 64, "length": 256},
                }
            )
            found.append(run(recipe, fresh=True).report.as_data()["models"])
        perplexities = [compressed["text"]["perplexity"] for _, compressed in found]
        row = {
            "model": Path(model).name,
            "bits": bits,
            "group_size": group,
            "method": name,
            "perplexity_original": round(found[0][0]["text"]["perplexity"], 3),
            "perplexity": [round(p, 3) for p in perplexities],
            "perplexity_mean": round(statistics.mean(perplexities), 3),
            "kl": [round(compressed["against"]["kl"], 5) for _, compressed in found],
            "top1_agreement": [round(compressed["against"]["top1_agreement"], 4) for _, compressed in found],
        }
        rows.append(row)
        print(
            row["model"],
            f"W{bits} g{group}",
            name,
            row["perplexity_original"],
            row["perplexity"],
            row["kl"],
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
