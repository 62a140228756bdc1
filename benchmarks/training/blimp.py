"""Is training under quantization better in BLiMP, too? smelt-6m at two and three bits, three seeds, 45 phenomena.

    python -m benchmarks.training.blimp [--seed N]

Two sets of 300 sentences (benchmarks/training/methods.py) leave an uncertainty that hides what there is to see. Here the best rounding and the
training that begins with it are judged on 1000 pairs of each of 45 phenomena: by the sum of log-probabilities, with transformers' own
model, the better sentence must be the likelier one. Rows that the result's file holds are not measured again. Needs ../shared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.models.directory.find import find_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import C4, ResultRows, parser, shared
from .methods import SEEDS, jobs, mixture

PAIRS = 1000
BATCH = 250
METHODS = tuple(
    f"{scheme} {how}" for scheme in ("W2A16 g64", "W3A16 g128") for how in ("signround", "signround, trained")
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, action="append")
    seeds = options.parse_args().seed or SEEDS
    rows = ResultRows("blimp", "python -m benchmarks.training.blimp")
    with tempfile.TemporaryDirectory() as scratch:
        text = mixture(Path(scratch) / "mixture.jsonl")
        steps = dict(jobs("bits", text))
        for seed in seeds:
            for method in ("the original", *METHODS):
                if rows.has(method=method, seed=seed):
                    continue
                if method == "the original":
                    accuracies = judged(find_model("builtin:smelt-6m").path) if seed == 0 else None
                else:
                    accuracies = judged(_made(steps[method], seed, Path(scratch) / "out"))
                if accuracies is not None:
                    mean = round(statistics.mean(accuracies.values()), 4)
                    rows.add({"method": method, "seed": seed, "mean": mean, "accuracies": accuracies})
    for method in ("the original", *METHODS):
        print(method, [row["mean"] for row in rows if row["method"] == method])


def judged(directory: Path) -> dict[str, float]:
    """The share of pairs whose better sentence is the likelier one, of each phenomenon."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = {}
    for file in sorted((shared("data/eval/blimp")).glob("*.jsonl")):
        pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:PAIRS]]
        batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
        good, bad = (
            torch.cat(
                [_likelihoods(model, tokenizer, [pair[f"sentence_{kind}"] for pair in batch]) for batch in batches]
            )
            for kind in ("good", "bad")
        )
        found[file.stem] = round(float((good > bad).float().mean()), 4)
    return found


@torch.no_grad()
def _likelihoods(model: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    # After a line's end, so that the first word counts, too.
    ids = [tokenizer("\n" + sentence, add_special_tokens=True)["input_ids"] for sentence in sentences]
    longest = max(map(len, ids))
    tokens = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
    inside = torch.tensor([[1.0] * (len(each) - 1) + [0.0] * (longest - len(each)) for each in ids])
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return -(losses * inside).sum(1)


def _made(steps: list[dict[str, Any]], seed: int, output: Path) -> Path:
    calibrate = {"source": str(shared(C4)), "samples": 128, "length": 256}
    recipe = {"model": "builtin:smelt-6m", "output": str(output), "seed": seed, "steps": steps}
    return run(
        Recipe.model_validate({**recipe, "calibrate": calibrate, "evaluate": False}), fresh=True, progress=False
    ).checkpoint


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"] if path.exists() else []


if __name__ == "__main__":
    main()
