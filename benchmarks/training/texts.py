"""Is what distillation wins the judging text's doing? The pruned half of smelt-6m, trained both ways, on texts that it was not trained on.

    python -m benchmarks.training.texts [--seed N]

The same checkpoints as ``benchmarks.training.methods --part pruned`` makes of a seed, read by transformers in float32 on 128 x 256 tokens each of:
Wikipedia and Shakespeare, which smelt-6m has not seen either, and WikiText-2 test with its ``<unk>``. Rows that
the result's file holds are not measured again. Needs ../shared.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import evaluation_windows
from torch import Tensor
from transformers import AutoTokenizer

from ..common import C4, SMELT_6M, WIKITEXT_TEST, ResultRows, parser, shared
from ..pruning.texts import judged
from .methods import SEEDS, jobs, mixture

METHODS = ("half of the parameters pruned", "pruned, distilled", "pruned, trained on the text")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, action="append")
    seeds = options.parse_args().seed or SEEDS
    rows = ResultRows("training_texts", "python -m benchmarks.training.texts")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        windows = texts()
        steps = dict(jobs("pruned", mixture(scratch / "mixture.jsonl")))
        if not rows:
            rows.add({"method": "the original", "seed": 0, "perplexity": judged(SMELT_6M, windows)})
        for seed in seeds:
            for method in METHODS:
                if not rows.has(method=method, seed=seed):
                    checkpoint = made(steps[method], seed, scratch / "out")
                    rows.add({"method": method, "seed": seed, "perplexity": judged(checkpoint, windows)})
    for method in METHODS:
        mine = [row["perplexity"] for row in rows if row["method"] == method]
        print(method, {text: round(statistics.mean(each[text] for each in mine), 2) for text in windows})


def texts() -> dict[str, Tensor]:
    """Windows of each text."""
    sources = {
        "Wikipedia": shared("data/calib/wiki.utf8"),
        "Shakespeare": shared("data/text/tinyshakespeare.txt"),
        "WikiText-2 test, <unk>": shared(WIKITEXT_TEST),
    }
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    return {
        name: evaluation_windows(TextSource(str(source), "evaluation"), tokenizer, 128, 256).tokens
        for name, source in sources.items()
    }


def made(steps: list[dict[str, Any]], seed: int, output: Path) -> Path:
    """A checkpoint, of the recipe that benchmarks/training/methods.py measures."""
    calibrate = {"source": str(shared(C4)), "samples": 128, "length": 256}
    recipe = {"model": "builtin:smelt-6m", "output": str(output), "seed": seed, "steps": steps}
    whole = Recipe.model_validate({**recipe, "calibrate": calibrate, "evaluate": False})
    return run(whole, fresh=True, progress=False).checkpoint


if __name__ == "__main__":
    main()
