"""Torch-Pruning and Smelt on the same model, ratio and windows: perplexity after pruning, without training.

    python -m benchmarks.pruning.peer --torch-pruning PEER/bin/python

smelt-6m, 128 x 256 tokens of C4 drawn by seeds 0 to 2; perplexity on the first 128 x 256 tokens of WikiText-2 test, read by
transformers in float32 from both tools' checkpoints. Cases that the result's file holds are not measured again. Needs ../shared.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from smelt.compress import Recipe, run
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import calibration_windows, evaluation_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import C4, REPOSITORY, SMELT_6M, WIKITEXT_TEST, ResultRows, parser, shared

SEEDS = (0, 1, 2)


def _ours(what: str, ratio: float, *, plain: bool) -> list[dict[str, Any]]:
    update = {} if plain else {"update": "least_squares"}
    hidden = {"structure": "hidden", "ratio": ratio, "score": "activation" if plain else "pca"}
    ffn = {"structure": "ffn", "ratio": ratio, "score": "wanda", **update}
    return [*([hidden] if what != "ffn" else []), *([ffn] if what != "hidden" else [])]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--torch-pruning", type=Path, required=True, metavar="PYTHON")
    peer = options.parse_args().torch_pruning
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    source = TextSource(str(shared(WIKITEXT_TEST)), "evaluation")
    held_out = evaluation_windows(source, tokenizer, 128, 256).tokens
    rows = ResultRows("pruning_peer", "python -m benchmarks.pruning.peer --torch-pruning PEER/bin/python")
    if not rows:
        rows.add({"method": "unpruned", "perplexity": [round(_perplexity(SMELT_6M, held_out), 2)]})
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for what, ratio in (("ffn", 0.25), ("ffn", 0.5), ("hidden", 0.25), ("both", 0.25)):
            for importance in ("magnitude", "taylor"):
                case = {"method": f"Torch-Pruning {importance}", "pruned": what, "ratio": ratio}
                if not rows.has(**case):
                    seeds = SEEDS if importance == "taylor" else SEEDS[:1]
                    made = [_theirs(peer, importance, what, ratio, seed, tokenizer, scratch) for seed in seeds]
                    rows.add({**case, "perplexity": [round(_perplexity(each, held_out), 2) for each in made]})
            for label, plain in (("Smelt, no update", True), ("Smelt", False)):
                case = {"method": label, "pruned": what, "ratio": ratio}
                if not rows.has(**case):
                    made = [_smelt(_ours(what, ratio, plain=plain), seed, scratch) for seed in SEEDS]
                    rows.add({**case, "perplexity": [round(_perplexity(each, held_out), 2) for each in made]})


def _theirs(peer: Path, importance: str, what: str, ratio: float, seed: int, tokenizer: Any, scratch: Path) -> Path:
    windows = calibration_windows(TextSource(str(shared(C4)), "calibration"), tokenizer, 128, 256, seed)
    save_file({"tokens": windows.tokens.contiguous()}, scratch / "tokens.safetensors")
    out = scratch / f"{importance}-{what}-{ratio}-{seed}"
    command = [str(peer), str(REPOSITORY / "benchmarks/peers/prune_torch_pruning.py"), "--model", str(SMELT_6M)]
    command += ["--tokens", str(scratch / "tokens.safetensors"), "--importance", importance, "--what", what]
    done = subprocess.run(
        [*command, "--ratio", str(ratio), "--out", str(out)], capture_output=True, text=True, check=True
    )
    print(json.loads(done.stdout.splitlines()[-1]), flush=True)
    return out


def _smelt(steps: list[dict[str, Any]], seed: int, scratch: Path) -> Path:
    recipe = {
        "model": "builtin:smelt-6m",
        "output": str(scratch / f"smelt-{len(list(scratch.iterdir()))}"),
        "seed": seed,
        "calibrate": {"source": str(shared(C4)), "samples": 128, "length": 256},
        "steps": [{"prune": step} for step in steps],
        "evaluate": False,
    }
    return run(Recipe.model_validate(recipe), progress=False).checkpoint


@torch.no_grad()
def _perplexity(path: Path, windows: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    total = 0.0
    for start in range(0, len(windows), 16):
        part = windows[start : start + 16]
        logits = model(part, use_cache=False).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / windows[:, 1:].numel())


if __name__ == "__main__":
    main()
