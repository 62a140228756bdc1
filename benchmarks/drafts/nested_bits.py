"""What 8-bit codes and their upper four bits lose, rounded for both and otherwise.

    python -m benchmarks.drafts.nested_bits [--windows 64]

smelt-6m in groups of 128, on WikiText-2's validation text, on the compiled CPU kernels: perplexity, and two shares of positions: ``top`` has the
same most likely token, and ``overlap`` is the acceptance of exact speculative sampling, the mean of the sum of the smaller probabilities.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.runtime import EngineConfig
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.prompt_states import prompt_states
from smelt.runtime.engine.drafters.draft_model import DraftModel
from smelt.runtime.engine.setup.loading import load_model
from smelt.runtime.parallel.stages import RankPlace
from torch import Tensor

from ..common import SMELT_6M, WIKITEXT_VALIDATION, parser, save, shared

LENGTH = 256
FORMS: dict[str, dict[str, Any]] = {
    "W8A16, nearest": {"scheme": "W8A16"},
    "W4A16, GPTQ": {"scheme": "W4A16", "rounding": "gptq"},
    **{
        f"W4in8, give {give:g}": {"scheme": "W4in8", "rounding": {"method": "nested", "give": give}}
        for give in (0.0, 0.0625, 0.125, 0.25, 0.5)
    },
}


def logits_of(model: Model, windows: list[list[int]]) -> Tensor:
    """Of all positions but the last of each window."""
    return torch.cat([model.head.logits(next(prompt_states(model, [each]))[0, :-1]) for each in windows])


def perplexity(logits: Tensor, windows: list[list[int]]) -> float:
    """Of the windows' tokens."""
    following = torch.tensor([token for each in windows for token in each[1:]])
    return float(torch.nn.functional.cross_entropy(logits, following).exp())


def beside(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """How often both agree."""
    shares = torch.minimum(logits.softmax(-1), reference.softmax(-1)).sum(-1)
    return {
        "top": float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
        "overlap": float(shares.mean()),
    }


def main() -> None:
    """Measure all of them."""
    options = parser(__doc__)
    options.add_argument("--windows", type=int, default=64)
    count = options.parse_args().windows
    opened, original = load_model(SMELT_6M, EngineConfig(dtype="bfloat16"), log=print)
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:200000]
    tokens = list(opened.directory.tokenizer()(text).input_ids)
    windows = [tokens[i * LENGTH : (i + 1) * LENGTH] for i in range(count)]
    reference = logits_of(original, windows)
    rows: list[dict[str, Any]] = [{"form": "bfloat16", "perplexity": perplexity(reference, windows)}]
    with tempfile.TemporaryDirectory(prefix="smelt-nested-") as scratch:
        for name, quantize in FORMS.items():
            recipe = {
                "model": str(SMELT_6M),
                "output": str(Path(scratch) / name.replace(" ", "-")),
                "evaluate": False,
                "steps": [{"quantize": {**quantize, "ignore": []}}],
            }
            checkpoint = run(Recipe.model_validate(recipe), progress=False).checkpoint
            nests = "W4A16" not in name
            config = EngineConfig(dtype="bfloat16", drafter="nested" if nests else None)
            found, model = load_model(checkpoint, config, log=print)
            logits = logits_of(model, windows)
            row: dict[str, Any] = {
                "form": name, "perplexity": perplexity(logits, windows), "beside_original": beside(logits, reference),
            }  # fmt: skip
            if nests:
                drafter = DraftModel.nested(found, model, RankPlace(), divides_experts=False, log=print)
                upper = logits_of(drafter.model, windows)
                row |= {"upper_perplexity": perplexity(upper, windows), "upper_beside_whole": beside(upper, logits)}
            print(row, flush=True)
            rows.append(row)
    command = f"python -m benchmarks.drafts.nested_bits --windows {count}"
    print(save("nested_bits", command, {"windows": count, "length": LENGTH, "rows": rows}))


if __name__ == "__main__":
    main()
