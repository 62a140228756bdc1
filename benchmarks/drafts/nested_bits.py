"""What 8-bit codes and their upper four bits lose, rounded for both and otherwise.

    python -m benchmarks.drafts.nested_bits [--windows 64]

smelt-6m in groups of 128, on WikiText-2's validation text, on the compiled CPU kernels: perplexity, and two shares of positions: ``top`` has the
same most likely token, and ``overlap`` is the acceptance of exact speculative sampling, the mean of the sum of the smaller probabilities. The
trained forms have learned from WikiText-2's training text, so they are measured on TinyStories, too, of which smelt-6m has not seen the last
hundred.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.compress.recipe.drafting import GIVE
from smelt.runtime import EngineConfig
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.prompt_states import prompt_states
from smelt.runtime.engine.drafters.draft_model import DraftModel
from smelt.runtime.engine.setup.loading import load_model
from smelt.runtime.parallel.stages import RankPlace
from torch import Tensor

from ..common import SMELT_6M, TINYSTORIES, WIKITEXT_VALIDATION, add_scratch, parser, save, shared
from .forms import TRAINED_ON, trained_forms

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


def windows_of(tokens: list[int], count: int) -> list[list[int]]:
    """The first pieces of a text."""
    return [tokens[i * LENGTH : (i + 1) * LENGTH] for i in range(count)]


def measured(form: str, checkpoint: Path, texts: list[list[list[int]]], references: list[Tensor]) -> dict[str, Any]:
    """A form beside the original on WikiText-2, and its upper bits beside all of them on both texts."""
    nests = "W4A16" not in form
    found, model = load_model(
        checkpoint, EngineConfig(dtype="bfloat16", drafter="nested" if nests else None), log=print
    )
    ours = [logits_of(model, windows) for windows in texts]
    row: dict[str, Any] = {
        "form": form,
        "perplexity": perplexity(ours[0], texts[0]),
        "beside_original": beside(ours[0], references[0]),
    }
    if not nests:
        return row | {"beside_original_elsewhere": beside(ours[1], references[1])}
    drafter = DraftModel.nested(found, model, RankPlace(), divides_experts=False, log=print)
    upper = [logits_of(drafter.model, windows) for windows in texts]
    return row | {
        "upper_perplexity": perplexity(upper[0], texts[0]),
        "upper_beside_whole": beside(upper[0], ours[0]),
        "upper_beside_whole_elsewhere": beside(upper[1], ours[1]),
    }


def main() -> None:
    """Measure all of them."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--windows", type=int, default=64)
    given = options.parse_args()
    opened, original = load_model(SMELT_6M, EngineConfig(dtype="bfloat16"), log=print)
    tokenizer = opened.directory.tokenizer()
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:200000]
    stories = "\n\n".join(json.loads(shared(TINYSTORIES).read_text(encoding="utf-8"))[-100:])
    texts = [windows_of(list(tokenizer(each).input_ids), given.windows) for each in (text, stories)]
    references = [logits_of(original, windows) for windows in texts]
    rows: list[dict[str, Any]] = [{"form": "bfloat16", "perplexity": perplexity(references[0], texts[0])}]
    with tempfile.TemporaryDirectory(prefix="smelt-nested-") as room:
        for name, quantize in FORMS.items():
            recipe = {
                "model": str(SMELT_6M),
                "output": str(Path(room) / name.replace(" ", "-")),
                "evaluate": False,
                "steps": [{"quantize": {**quantize, "ignore": []}}],
            }
            checkpoint = run(Recipe.model_validate(recipe), progress=False).checkpoint
            rows.append(measured(name, checkpoint, texts, references))
            print(rows[-1], flush=True)
    trained = trained_forms(given.scratch)
    for name, form in (("W4A16, trained", "w4"), (f"W4in8, give {GIVE:g}, trained", "w4in8")):
        rows.append(measured(name, trained[form], texts, references))
        print(rows[-1], flush=True)
    command = f"python -m benchmarks.drafts.nested_bits --windows {given.windows}"
    facts = {"windows": given.windows, "length": LENGTH, "trained_on": TRAINED_ON, "rows": rows}
    print(save("nested_bits", command, facts))


if __name__ == "__main__":
    main()
