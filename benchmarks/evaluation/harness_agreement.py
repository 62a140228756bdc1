"""Scores of the engine beside those of lm-eval's own ``hf`` model, on whole tasks.

    python -m benchmarks.evaluation.harness_agreement [--limit 1000]

A model and its W4A16 checkpoint, each by both in float32 and as both run it by default (bfloat16).
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from smelt.compress import Recipe, run
from smelt.compress.evaluation.scoring.task_code import BUILTIN
from smelt.compress.integrations.lm_eval import SmeltLM

from ..common import REPOSITORY, SMELT_6M, parser, save

NAME = "harness_agreement"
TASKS = [
    "shared_lambada",
    "shared_blimp_anaphor_gender_agreement",
    "shared_blimp_determiner_noun_agreement_1",
    "shared_hellaswag",
    "shared_piqa",
    "shared_arc_easy",
    "shared_arc_challenge",
    "smelt_last_word",
    "smelt_continuation",
    "smelt_text",
]


def main() -> None:
    """Compare, print a line a task, and save."""
    options = parser(__doc__)
    options.add_argument("--limit", type=int, default=1000)
    options.add_argument("--batch", type=int, default=16, help="of the hf model")
    chosen = options.parse_args()
    for name in ("lm_eval", "api.task", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = {
            "model": str(SMELT_6M),
            "output": f"{scratch}/w4",
            "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": "gptq"}}],
            "evaluate": False,
        }
        w4 = run(Recipe.model_validate(recipe)).checkpoint
        rows = [row for label, path in (("original", SMELT_6M), ("W4A16", w4)) for row in compare(label, path, chosen)]
    command = f"python -m benchmarks.evaluation.harness_agreement --limit {chosen.limit} --batch {chosen.batch}"
    save(NAME, command, {"limit": chosen.limit, "rows": rows})


def compare(label: str, path: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a task: its metrics by every model."""
    peer: Any = HFLM  # whose decorator hides its options
    models = {
        "smelt, float32": SmeltLM(str(path), dtype="float32", disable_tqdm=True, quiet=True),
        "hf, float32": peer(pretrained=str(path), dtype="float32", device="cpu", batch_size=chosen.batch),
        "smelt, as served": SmeltLM(str(path), disable_tqdm=True, quiet=True),
        "hf, bfloat16": peer(pretrained=str(path), dtype="auto", device="cpu", batch_size=chosen.batch),
    }
    rows = []
    for task in TASKS:
        found = {name: _evaluate(model, task, chosen.limit) for name, model in models.items()}
        rows.append({"model": label, "task": task, "metrics": found})
        print(label, task, *(f"{name}: {values}" for name, values in found.items()), sep="\n  ", flush=True)
    return rows


def _evaluate(model: Any, task: str, limit: int) -> dict[str, float]:
    paths: list[str | Path] = [str(BUILTIN), str(REPOSITORY / "tests" / "tasks")]
    manager = TaskManager(include_path=paths, include_defaults=False)
    found: Any = evaluator.evaluate(lm=model, task_dict=manager.load([task]), limit=limit, bootstrap_iters=0)
    assert found is not None
    return {
        key.partition(",")[0]: value
        for key, value in found["results"][task].items()
        if isinstance(value, float) and "stderr" not in key
    }


if __name__ == "__main__":
    main()
