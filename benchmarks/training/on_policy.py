"""Does a student learn more from its own text, which the teacher judges, than from other text? smelt-6m, real text, three seeds.

    python -m benchmarks.training.on_policy

A student of half the parameters, distilled on 400k tokens of text (benchmarks/training/methods.py's shape and mixture), is distilled on 300k
more: of the text, of text that the teacher wrote, and of its own, all or half. Prompts are 32 of 256 tokens. Measured on WikiText-2 test:
perplexity, divergence from the teacher on the text, and what the student writes after 256 prompts of 32 tokens: the teacher's log-likelihood
of 64 sampled tokens (and how many of their pairs of tokens are different ones, for a dull text is likely, too), and how often the first
one, four and eight greedy tokens are exactly the teacher's. The seed draws text, its order and samples. Rows that the result's file holds
are not measured again. Needs ../shared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.models.directory.find import find_model
from smelt.runtime import Engine, SamplingParams
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import C4, WIKITEXT_TEST, ResultRows, parser, shared
from .methods import PRUNED, SEEDS, mixture

BEGINNING, TOKENS = 400_000, 300_000
PROMPTS, PROMPT, WRITTEN = 256, 32, 64
VARIANTS: dict[str, dict[str, Any]] = {
    "not trained on": {},
    "the text": {"data": {}},
    "the teacher's text": {"data": {"writer": "teacher"}},
    "its own text": {"data": {"writer": "student"}},
    "half of it its own": {"data": {"writer": "student", "share": 0.5}},
    "the text, reverse KL": {"data": {}, "loss": "reverse_kl"},
    "its own text, reverse KL": {"data": {"writer": "student"}, "loss": "reverse_kl"},
}


def main() -> None:
    parser(__doc__).parse_args()
    rows = ResultRows("on_policy", "python -m benchmarks.training.on_policy")
    with tempfile.TemporaryDirectory() as scratch:
        text, place = mixture(Path(scratch) / "mixture.jsonl"), Path(scratch)
        teacher = find_model("builtin:smelt-6m").path
        judge = Judge(teacher)
        if not rows.has(**{"trained on": "the teacher itself"}):
            rows.add({"trained on": "the teacher itself", "seed": 0, **judge.judged(teacher, 1)})
        for seed in SEEDS:
            begun, first = None, dict[str, Any]()
            for label, changes in VARIANTS.items():
                if rows.has(**{"trained on": label, "seed": seed}):
                    continue
                if begun is None:
                    usual = {"tokens": BEGINNING, "data": text, "learning_rate": 2e-3}
                    begun, first = trained("builtin:smelt-6m", [*PRUNED, {"distill": usual}], seed, place / "begun")
                directory, found = begun, first
                if changes:
                    data = {"source": text, "prompt": PROMPT, **changes["data"]}
                    step = {"tokens": TOKENS, "teacher": str(teacher), "learning_rate": 1e-3, **changes, "data": data}
                    directory, found = trained(str(begun), [{"distill": step}], seed, place / "out")
                rows.add({"trained on": label, "seed": seed, **found, **judge.judged(directory, seed)})
    for label in ("the teacher itself", *VARIANTS):
        mine = [row for row in rows if row["trained on"] == label]
        print(label, *(f"{key} {_spread([row[key] for row in mine])}" for key in list(mine[0])[2:] if key != "date"))


def trained(model: str, steps: list[dict[str, Any]], seed: int, output: Path) -> tuple[Path, dict[str, Any]]:
    """A model that was trained, and what it makes of the text."""
    recipe = Recipe.model_validate(
        {
            "model": model,
            "output": str(output),
            "seed": seed,
            "calibrate": {"source": str(shared(C4)), "samples": 128, "length": 256},
            "steps": steps,
            "evaluate": {
                "text": str(shared(WIKITEXT_TEST)),
                "windows": 64,
                "length": 256,
                "samples": 0,
                "speed": False,
            },
        }
    )
    report = run(recipe, fresh=True, progress=False).report.as_data()
    facts = json.loads((output / "checkpoint/smelt.json").read_text())
    seconds = next(step["training"]["seconds"] for step in facts["steps"] if "training" in step)
    found = {"perplexity": round(report["models"][1]["text"]["perplexity"], 2), "seconds": round(seconds, 1)}
    return output / "checkpoint", found


class Judge:
    """Judges what models write after the beginnings of windows of the text.

    Args:
        teacher: who judges.
    """

    def __init__(self, teacher: Path) -> None:
        self._teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(teacher)(shared(WIKITEXT_TEST).read_text(encoding="utf-8"))["input_ids"]
        every = len(ids) // PROMPTS
        self._windows = torch.tensor([ids[i * every : i * every + 256] for i in range(PROMPTS)])
        self._prompts = self._windows[:, :PROMPT]
        self._greedy = self._written(teacher, 0.0, 0)[:, PROMPT:]

    def judged(self, directory: Path, seed: int) -> dict[str, float]:
        """How near a model is to the teacher, on the text and in what it writes."""
        student = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        sampled, greedy = self._written(directory, 1.0, seed), self._written(directory, 0.0, 0)[:, PROMPT:]
        same = (greedy == self._greedy).long().cumprod(1)
        divergences = [(t.exp() * (t - s)).sum(-1).mean() for t, s in self._both(student, self._windows[:64])]
        pairs = [set(pairwise(row)) for row in sampled[:, PROMPT:].tolist()]
        return {
            "kl": round(float(torch.stack(divergences).mean()), 4),
            "likelihood": round(self._likelihood(sampled), 4),
            "different pairs": round(statistics.mean(len(each) / (WRITTEN - 1) for each in pairs), 4),
            **{f"exactly {n}": round(float(same[:, n - 1].float().mean()), 4) for n in (1, 4, 8)},
        }

    def _written(self, directory: Path, temperature: float, seed: int) -> Tensor:
        engine = Engine(directory, max_model_len=PROMPT + WRITTEN, memory_utilization=0.5, quiet=True)
        params = [
            SamplingParams(max_tokens=WRITTEN, temperature=temperature, ignore_eos=True, seed=seed * 10_007 + i)
            for i in range(PROMPTS)
        ]
        outputs = engine.generate(self._prompts.tolist(), params)
        return torch.cat((self._prompts, torch.tensor([each.outputs[0].token_ids for each in outputs])), 1)

    @torch.no_grad()
    def _likelihood(self, tokens: Tensor) -> float:
        found = []
        for part in tokens.split(32):
            logs = self._teacher(input_ids=part).logits.log_softmax(-1)[:, PROMPT - 1 : -1]
            found.append(logs.gather(-1, part[:, PROMPT:, None]).mean())
        return float(torch.stack(found).mean())

    @torch.no_grad()
    def _both(self, student: Any, windows: Tensor) -> list[tuple[Tensor, Tensor]]:
        models = (self._teacher, student)
        return [tuple(model(input_ids=part).logits.log_softmax(-1) for model in models) for part in windows.split(16)]  # type: ignore[misc]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values) if len(values) > 1 else 0:.2g}"


if __name__ == "__main__":
    main()
