"""Does training win back what pruning and few bits lose? smelt-6m, real text, three seeds.

    python -m benchmarks.training.methods [--part pruned|bits]

``pruned``: half of the parameters pruned (blocks, then feed-forward channels), then trained on the same tokens by the
teacher's predictions or by the text alone, beside the same shape trained from scratch. ``bits``: two and three bits, trained from
the best of the roundings without training (benchmarks/quantization/orderings.py) beside it. Trained on a mixture like the one that
smelt-6m was trained on (novels, C4, stories, WikiText's training part); measured on WikiText-2 test (128 x 256 tokens), LAMBADA and
BLiMP. The seed draws calibration windows, the order of the text and random weights. Rows that the result's file
holds are not measured again. Needs ../shared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from smelt.compress import Recipe, run

from ..common import C4, REPOSITORY, WIKITEXT_TEST, ResultRows, parser, shared

SEEDS = (0, 1, 2)
TASKS = ("lambada", "blimp_determiner_noun_agreement_1", "blimp_wh_questions_object_gap")
PRUNED: list[dict[str, Any]] = [
    {"prune": {"structure": "blocks", "score": "loss", "count": 2}},
    {"prune": {"structure": "ffn", "score": "activation", "ratio": 0.58, "update": "least_squares"}},
]
TOKENS = {"pruned": 1_200_000, "bits": 800_000}
_PIECE = 6000


def jobs(part: str, text: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What is measured: how it is called, and the steps."""
    tokens = TOKENS[part]
    if part == "pruned":
        usual = {"tokens": tokens, "data": text, "learning_rate": 2e-3}
        yield "half of the parameters pruned", PRUNED
        yield "pruned, distilled", [*PRUNED, {"distill": usual}]
        yield "pruned, trained on the text", [*PRUNED, {"distill": {**usual, "cross_entropy": 1.0}}]
        yield "from scratch, on the text", [*PRUNED, {"distill": {**usual, "cross_entropy": 1.0, "student": "random"}}]
        yield "from scratch, distilled", [*PRUNED, {"distill": {**usual, "student": "random"}}]
        return
    for scheme, group in (("W2A16", 64), ("W3A16", 128)):
        signround = {"method": "signround", "iterations": 200}
        step = {"scheme": scheme, "group_size": group, "rounding": signround}
        train = {"tokens": tokens, "data": text, "learning_rate": 3e-4}
        yield f"{scheme} g{group} signround", [{"quantize": step}]
        yield f"{scheme} g{group} gptq, trained", [{"quantize": {**step, "rounding": "gptq", "train": train}}]
        yield f"{scheme} g{group} signround, trained", [{"quantize": {**step, "train": train}}]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=("pruned", "bits"), action="append")
    parts = options.parse_args().part or ("pruned", "bits")
    rows = ResultRows("training", "python -m benchmarks.training.methods")
    with tempfile.TemporaryDirectory() as scratch:
        text = mixture(Path(scratch) / "mixture.jsonl")
        for part in parts:
            for label, steps in jobs(part, text):
                for seed in SEEDS:
                    if not rows.has(method=label, seed=seed):
                        rows.add(measure(label, steps, seed, Path(scratch)))
    for part in parts:
        for label, _ in jobs(part, ""):
            mine = [row for row in rows if row["method"] == label]
            print(label, *(f"{key} {_spread([row[key] for row in mine])}" for key in ("perplexity", "kl")))


def mixture(path: Path) -> str:
    """Pieces of all training texts in an order of their own, always the same."""
    data = shared("data")
    texts = [
        each.read_text(encoding="utf-8", errors="replace") for each in sorted((data / "text/novels").glob("*.txt"))
    ]
    texts = [text[20_000:140_000] for text in texts]  # none of them whole, for the others' sake
    texts.append((data / "text/wikitext2_train_raw_part.txt").read_text(encoding="utf-8"))
    pieces = [text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE)]
    pieces += [json.loads(line)["text"] for line in (data / "calib/c4_1000_docs.jsonl").open(encoding="utf-8")]
    pieces += json.loads((data / "text/tinystories_1000.json").read_text(encoding="utf-8"))[:900]
    Random(0).shuffle(pieces)
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")
    return str(path)


def measure(label: str, steps: list[dict[str, Any]], seed: int, scratch: Path) -> dict[str, Any]:
    """One row of the result."""
    recipe = Recipe.model_validate(
        {
            "model": "builtin:smelt-6m",
            "output": str(scratch / "out"),
            "seed": seed,
            "calibrate": {"source": str(shared(C4)), "samples": 128, "length": 256},
            "steps": steps,
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
    report = run(recipe, fresh=True, progress=False).report.as_data()
    before, after = report["models"]
    facts = json.loads((scratch / "out/checkpoint/smelt.json").read_text())
    trained = next((step["training"] for step in facts["steps"] if "training" in step), None)
    return {
        "method": label,
        "seed": seed,
        "parameters": [before["size"]["parameters"], after["size"]["parameters"]],
        "bytes": [before["size"]["bytes"], after["size"]["bytes"]],
        "perplexity_original": round(before["text"]["perplexity"], 2),
        "perplexity": round(after["text"]["perplexity"], 2),
        "kl": round(after["against"]["kl"], 4),
        "tasks_original": _accuracies(before),
        "tasks": _accuracies(after),
        "sample": after["samples"][0]["text"][:200],
        **({} if trained is None else {"tokens": trained["tokens"], "seconds": round(trained["seconds"], 1)}),
    }


def _accuracies(model: dict[str, Any]) -> dict[str, float]:
    return {task["task"]: round(task["value"], 4) for task in model["tasks"] if task["metric"] == "acc"}


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values) if len(values) > 1 else 0:.2g}"


if __name__ == "__main__":
    main()
