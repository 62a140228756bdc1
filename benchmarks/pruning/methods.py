"""What pruning costs smelt-6m before any training: single weights by every method, widths, blocks and their parts. Three calibration seeds.

    python -m benchmarks.pruning.methods

128 x 256 tokens of C4 calibrate. Never one metric alone: perplexity and divergence on WikiText-2 test (128 x 256
tokens), and the accuracy of 300 items each of LAMBADA and of two of BLiMP's sets. The spread is over the seeds, which draw the calibration windows. Rows that the result's file holds are not
measured again; delete the file to start over. Needs ../shared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run

from ..common import C4, REPOSITORY, WIKITEXT_TEST, ResultRows, parser, shared

SEEDS = (0, 1, 2)
TASKS = ("lambada", "blimp_determiner_noun_agreement_1", "blimp_wh_questions_object_gap")


def jobs() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """What is measured: how it is called, the step, and whether it reads calibration text."""
    for label, amount in (
        ("50%", {"structure": "weights", "sparsity": 0.5}),
        ("2:4", {"structure": "2:4"}),
        ("4:8", {"structure": "4:8"}),
        ("70%", {"structure": "weights", "sparsity": 0.7}),
    ):
        yield f"{label} magnitude", {**amount, "score": "magnitude"}, False
        yield f"{label} wanda", {**amount, "score": "wanda"}, True
        yield f"{label} wanda + sparsegpt's update", {**amount, "score": "wanda", "update": "sparsegpt"}, True
        yield f"{label} sparsegpt", {**amount, "update": "sparsegpt"}, True
    for share in (0.5, 0.7):
        for allocation in ("owl", "sensitivity"):
            for update in (None, "sparsegpt"):
                step = {"structure": "weights", "sparsity": share, "allocation": allocation, "update": update}
                yield f"{share:.0%} {'wanda' if update is None else update}, {allocation}", step, True
    for ratio in (0.25, 0.5):
        for score in ("weight", "activation", "wanda"):
            step = {"structure": "ffn", "score": score, "ratio": ratio}
            yield f"{ratio:.0%} of ffn, {score}", step, score != "weight"
            yield f"{ratio:.0%} of ffn, {score}, least squares", {**step, "update": "least_squares"}, True
    for score in ("taylor", "path"):
        step = {"structure": "ffn", "score": score, "ratio": 0.25}
        yield f"25% of ffn, {score}", step, score != "path"
        yield f"25% of ffn, {score}, least squares", {**step, "update": "least_squares"}, True
    for ratio in (0.25, 0.5):
        step = {"structure": "ffn", "score": "wanda", "ratio": ratio, "allocation": "sensitivity"}
        yield f"{ratio:.0%} of ffn, wanda, shared out", step, True
        yield f"{ratio:.0%} of ffn, wanda, least squares, shared out", {**step, "update": "least_squares"}, True
    for score in ("activation", "wanda", "taylor", "weight", "path"):
        step = {"structure": "heads", "score": score, "ratio": 0.5}
        yield f"50% of heads, {score}", step, score not in ("weight", "path")
        yield f"50% of heads, {score}, least squares", {**step, "update": "least_squares"}, True
    step = {"structure": "heads", "score": "wanda", "ratio": 0.5, "allocation": "sensitivity"}
    yield "50% of heads, wanda, least squares, shared out", {**step, "update": "least_squares"}, True
    for ratio in (0.25, 0.5):
        for score in ("pca", "activation", "taylor", "weight"):
            step = {"structure": "hidden", "score": score, "ratio": ratio}
            yield f"{ratio:.0%} of hidden, {score}", step, True
    for structure in ("attention", "mlp"):
        for score in ("influence", "loss"):
            yield f"1 of 6 {structure}, {score}", {"structure": structure, "score": score, "count": 1}, True
    for share in (0.7, 0.5):
        yield f"{share:g} of the parameters, auto", {"structure": "auto", "target": {"params": share}}, True
    for count in (1, 2):
        for score in ("influence", "loss"):
            step = {"structure": "blocks", "score": score, "count": count}
            yield f"{count} of 6 blocks, {score}", step, True
            yield f"{count} of 6 blocks, {score}, merged", {**step, "update": "merge"}, True


def main() -> None:
    parser(__doc__).parse_args()
    rows = ResultRows("pruning", "python -m benchmarks.pruning.methods")
    with tempfile.TemporaryDirectory() as scratch:
        for label, step, reads in jobs():
            if not rows.has(method=label):
                rows.add(measure(label, step, Path(scratch), SEEDS if reads else SEEDS[:1]))


def measure(label: str, step: dict[str, Any], scratch: Path, seeds: tuple[int, ...]) -> dict[str, Any]:
    """One row of the result."""
    found = []
    for seed in seeds:
        recipe = Recipe.model_validate(
            {
                "model": "builtin:smelt-6m",
                "output": str(scratch / "out"),
                "seed": seed,
                "calibrate": {"source": str(shared(C4)), "samples": 128, "length": 256},
                "steps": [{"prune": step}],
                "evaluate": {
                    "text": str(shared(WIKITEXT_TEST)),
                    "windows": 128,
                    "length": 256,
                    "samples": 2,
                    "trust_task_code": True,
                    "tasks": [str(REPOSITORY / f"tests/tasks/shared_{name}.yaml") for name in TASKS],
                    "limit": 300,
                    "speed": False,
                },
            }
        )
        found.append(run(recipe, fresh=True, progress=False).report.as_data()["models"])
    before = found[0][0]
    return {
        "method": label,
        "perplexity_original": round(before["text"]["perplexity"], 2),
        "perplexity": [round(after["text"]["perplexity"], 2) for _, after in found],
        "kl": [round(after["against"]["kl"], 4) for _, after in found],
        "tasks_original": _accuracies(before),
        "tasks": [_accuracies(after) for _, after in found],
        "sample": found[0][1]["samples"][0]["text"][:200] if found[0][1]["samples"] else None,
        "done": [warning for warning in found[0][1]["warnings"] if "removed" in warning],
    }


def _accuracies(model: dict[str, Any]) -> dict[str, float]:
    return {task["task"]: round(task["value"], 4) for task in model["tasks"] if task["metric"] == "acc"}


if __name__ == "__main__":
    main()
