"""What a loss makes of a drafter: half of smelt-6m's blocks, distilled to agree with the whole.

    python -m benchmarks.drafts.distilled [--tokens 400k]

Drafters see text that is written by people or by the model, and learn by different losses. They are compared on text that the model writes itself: how often the
most likely token is the same, the overlap (the acceptance of exact sampling), and the tokens that the engine accepts, greedy and sampled, in drafts of three.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.models.text.text_source import TextSource
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.engine.setup.config import EngineConfig
from smelt.runtime.engine.setup.loading import load_model
from smelt.runtime.measure.workload import text_prompts

from ..common import SMELT_6M, parser, save
from .nested_bits import beside, logits_of

PROMPT, WRITTEN, REQUESTS = 32, 96, 48
LEARNS: dict[str, dict[str, Any] | None] = {
    "not at all": None,
    "forward KL, text": {"loss": "forward_kl", "data": "builtin"},
    "forward KL, the model's text": {"loss": "forward_kl", "data": {"source": "builtin", "writer": "teacher"}},
    "total variation, text": {"loss": "total_variation", "data": "builtin"},
    "total variation, the model's text": {
        "loss": "total_variation",
        "data": {"source": "builtin", "writer": "teacher"},
    },
}


def accepted(checkpoint: Path, params: list[SamplingParams], prompts: list[list[int]]) -> dict[str, float | None]:
    """What the engine accepts of drafts of three."""
    engine = Engine(SMELT_6M, drafter=str(checkpoint), draft_tokens=3)
    engine.generate(prompts, params)
    assert engine.drafting is not None
    found = engine.drafting.total
    engine.close()
    return {"accepted": found.acceptance, "tokens": found.tokens_per_verification}


def main() -> None:
    """Distil and measure all of them."""
    options = parser(__doc__)
    options.add_argument("--tokens", default="400k")
    tokens = options.parse_args().tokens
    engine = Engine(SMELT_6M)
    make = text_prompts(engine.tokenizer, PROMPT, TextSource("builtin", "evaluation"))
    prompts = [make(PROMPT, seed) for seed in range(REQUESTS)]
    greedy = [SamplingParams(max_tokens=WRITTEN, temperature=0, ignore_eos=True)] * REQUESTS
    sampled = [SamplingParams(max_tokens=WRITTEN, seed=seed, ignore_eos=True) for seed in range(REQUESTS)]
    written = [
        prompt + output.outputs[0].token_ids
        for prompt, output in zip(prompts, engine.generate(prompts, sampled), strict=True)
    ]
    engine.close()
    _, original = load_model(SMELT_6M, EngineConfig(dtype="bfloat16"), log=print)
    reference = logits_of(original, written)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="smelt-drafters-") as scratch:
        for name, how in LEARNS.items():
            steps: list[dict[str, Any]] = [{"prune": {"structure": "blocks", "score": "influence", "count": 3}}]
            if how is not None:
                steps.append({"distill": {"teacher": "original", "tokens": tokens, "learning_rate": 1e-3, **how}})
            output = str(Path(scratch) / str(len(rows)))
            recipe = {"model": str(SMELT_6M), "output": output, "evaluate": False, "steps": steps}
            checkpoint = run(Recipe.model_validate(recipe), progress=False).checkpoint
            _, model = load_model(checkpoint, EngineConfig(dtype="bfloat16"), log=print)
            row = {
                "learns": name,
                **beside(logits_of(model, written), reference),
                "greedy": accepted(checkpoint, greedy, prompts),
                "sampled": accepted(checkpoint, sampled, prompts),
            }
            print(row, flush=True)
            rows.append(row)
    found = {"tokens": tokens, "blocks": "3 of 6", "written": WRITTEN, "requests": REQUESTS, "rows": rows}
    print(save("drafters", f"python -m benchmarks.drafts.distilled --tokens {tokens}", found))


if __name__ == "__main__":
    main()
