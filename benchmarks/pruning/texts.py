"""Does the order of the pruning methods depend on the text that judges? smelt-6m, single weights, six texts, three seeds.

    python -m benchmarks.pruning.texts

benchmarks/pruning/methods.py judges on WikiText-2 test, here with its words replaced by ``<unk>``. The same checkpoints, calibrated on 128 x
256 tokens of C4, are judged here on other texts as well, 128 x 256 tokens each, read by transformers in float32. Documents
of C4 that the calibration text holds, too, are left out. Rows that the result's file holds are not measured again. Needs ../shared.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import evaluation_windows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import C4, SMELT_6M, WIKITEXT_TEST, ResultRows, parser, shared

SEEDS = (0, 1, 2)
AMOUNTS = {"50%": {"structure": "weights", "sparsity": 0.5}, "2:4": {"structure": "2:4"}}
METHODS = {"magnitude": {"score": "magnitude"}, "wanda": {"score": "wanda"}, "sparsegpt": {"update": "sparsegpt"}}


def main() -> None:
    parser(__doc__).parse_args()
    rows = ResultRows("pruning_texts", "python -m benchmarks.pruning.texts")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        windows = texts(scratch)
        if not rows:
            rows.add({"method": "unpruned", "perplexity": judged(SMELT_6M, windows)})
        for amount, step in AMOUNTS.items():
            for method, more in METHODS.items():
                label = f"{amount} {method}"
                if rows.has(method=label):
                    continue
                found = [
                    judged(pruned({**step, **more}, seed, scratch / "out"), windows)
                    for seed in (SEEDS[:1] if method == "magnitude" else SEEDS)
                ]
                rows.add({"method": label, "perplexity": {text: [each[text] for each in found] for text in windows}})


def texts(scratch: Path) -> dict[str, Tensor]:
    """Windows of each text."""
    data = shared("data")
    known = shared(C4).read_text(encoding="utf-8")
    documents = [json.loads(line)["text"] for line in (data / "calib/c4_1000_docs.jsonl").open(encoding="utf-8")]
    others = [each for each in documents if len(each) > 200 and each[100:160] not in known]
    c4 = scratch / "c4.jsonl"
    c4.write_text("".join(json.dumps({"text": each}) + "\n" for each in others), encoding="utf-8")
    sources = {
        "C4": c4,
        "Wikipedia": data / "calib/wiki.utf8",
        "WikiText-2, raw": data / "text/wikitext2_train_raw_part.txt",
        "WikiText-2 test, <unk>": shared(WIKITEXT_TEST),
        "TinyStories": data / "text/tinystories_sample_exllamav2.txt",
        "Shakespeare": data / "text/tinyshakespeare.txt",
    }
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    return {
        name: evaluation_windows(TextSource(str(source), "evaluation"), tokenizer, 128, 256).tokens
        for name, source in sources.items()
    }


def pruned(step: dict[str, Any], seed: int, output: Path) -> Path:
    """A checkpoint."""
    calibrate = {"source": str(shared(C4)), "samples": 128, "length": 256}
    recipe = {"model": str(SMELT_6M), "output": str(output), "seed": seed, "steps": [{"prune": step}]}
    made = Recipe.model_validate({**recipe, "calibrate": calibrate, "evaluate": False})
    return run(made, fresh=True, progress=False).checkpoint


@torch.no_grad()
def judged(directory: Path, windows: dict[str, Tensor]) -> dict[str, float]:
    """Perplexity on each text."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = {}
    for name, tokens in windows.items():
        losses = [model(part, labels=part, use_cache=False).loss for part in tokens.split(16)]
        found[name] = round(float(torch.stack(losses).mean().exp()), 2)
    return found


if __name__ == "__main__":
    main()
