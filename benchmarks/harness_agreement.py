"""Scores of the engine beside those of lm-eval's own ``hf`` model, on whole tasks, and the time both take.

    python -m benchmarks.harness_agreement [--limit 1000]

The original is compared in float32 and as both run it by default (bfloat16); a W4A16 checkpoint as both run it by default.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from smelt.compress import Recipe, run
from smelt.compress.evaluation.harness_model import SmeltLM
from smelt.compress.evaluation.tasks import BUILTIN

from .common import REPOSITORY, save

NAME = "harness_agreement"
MODEL = REPOSITORY / "compress" / "builtin" / "smelt-6m"
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="of the hf model")
    chosen = parser.parse_args()
    for name in ("lm_eval", "api.task", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        recipe = {
            "model": str(MODEL),
            "output": f"{scratch}/w4",
            "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": "gptq"}}],
            "evaluate": False,
        }
        w4 = run(Recipe.model_validate(recipe)).checkpoint
        for label, path, dtype in (
            ("original, float32", MODEL, "float32"),
            ("original, bfloat16", MODEL, "auto"),
            ("W4A16, bfloat16", w4, "auto"),
        ):
            rows += compare(label, path, dtype, chosen.limit, chosen.batch)
    command = f"python -m benchmarks.harness_agreement --limit {chosen.limit} --batch {chosen.batch}"
    save(NAME, command, {"limit": chosen.limit, "rows": rows})


def compare(label: str, path: Path, dtype: str, limit: int, batch: int) -> list[dict[str, Any]]:
    """Both models on every task, one after the other."""
    ours = SmeltLM(str(path), dtype=dtype, disable_tqdm=True, quiet=True)
    theirs = HFLM(pretrained=str(path), dtype=dtype, device="cpu", batch_size=batch)
    rows = []
    for task in TASKS:
        found, seconds = {}, {}
        for name, model in (("smelt", ours), ("hf", theirs)):
            begun = time.perf_counter()
            found[name] = _evaluate(model, task, limit)
            seconds[name] = time.perf_counter() - begun
        metrics = {
            key: {"smelt": value, "hf": found["hf"][key], "difference": value - found["hf"][key]}
            for key, value in found["smelt"].items()
        }
        rows.append({"model": label, "task": task, "metrics": metrics, "seconds": seconds})
        shown = {key: f"{m['smelt']:.5g} {m['hf']:.5g}" for key, m in metrics.items()}
        print(label, task, shown, f"{seconds['hf'] / seconds['smelt']:.1f}x", flush=True)
    return rows


def _evaluate(model: Any, task: str, limit: int) -> dict[str, float]:
    paths = [str(BUILTIN), str(REPOSITORY / "tests" / "tasks")]
    manager = TaskManager(include_path=paths, include_defaults=False)
    found = evaluator.evaluate(lm=model, task_dict=manager.load([task]), limit=limit, bootstrap_iters=0)
    assert found is not None
    return {
        key.partition(",")[0]: value
        for key, value in found["results"][task].items()
        if isinstance(value, float) and "stderr" not in key
    }


if __name__ == "__main__":
    main()
