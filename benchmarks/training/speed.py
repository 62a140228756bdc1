"""How fast is training beside a bare loop of torch that does the same forward and backward passes?

    python -m benchmarks.training.speed

smelt-6m teaches itself, or learns from text, 16 x 256 tokens a step. The bare loop is what one would write: transformers' models in
bfloat16, all logits at once, ``kl_div`` or ``cross_entropy``, torch's fused AdamW on the bfloat16 weights; a second one keeps float32
weights under autocast. They take turns, five rounds of eight steps, in one process; medians of the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from smelt.distill.losses.options.base import LossOptions
from smelt.distill.losses.probabilities import most_likely
from smelt.distill.run.student import WholeModel
from smelt.distill.training.batches import TrainingBatch
from smelt.distill.training.objective import Distilling
from smelt.distill.training.optimizer import MasterAdamW, Rows
from smelt.distill.training.teachers import Comparison, ReadingTeacher, StoredTeacher
from smelt.distill.training.trainer import Trainer, TrainerSettings
from smelt.models.directory.find import find_model
from smelt.models.structure.open_model import OpenModel
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ..common import REPOSITORY, parser, save

ROUNDS, STEPS, BATCH, LENGTH, KEPT = 5, 8, 16, 256, 32
MODEL = REPOSITORY / "models/builtin/smelt-6m"
TOKENS = torch.randint(2, 4096, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


class Nowhere:
    """Keeps no snapshots: their time is measured separately."""

    def load(self) -> None:
        """There is none."""

    def save(self, tensors: dict[str, Tensor], rows: Mapping[str, Rows], data: dict[str, Any]) -> None:
        """Nothing is kept."""


def ours(kind: str) -> Callable[[], None]:
    """Some steps of Smelt's trainer."""
    student = WholeModel(_opened(), torch.bfloat16, torch.device("cpu"))
    comparison = Comparison("forward_kl", LossOptions())
    teacher = None
    if kind != "text":
        reading = WholeModel(_opened(), torch.bfloat16, torch.device("cpu"))
        teacher = ReadingTeacher(reading.split, comparison)
        if kind == "stored":
            with torch.no_grad():
                logits = reading.module(input_ids=TOKENS).logits
            vocabulary = logits.shape[-1]
            places, kept = most_likely(logits, KEPT, 1.0)
            teacher = StoredTeacher("forward_kl", lambda _: (places, kept), 1.0, vocabulary)
    optimizer = MasterAdamW(student.trained(), 0.0)
    learner = Distilling(student.split, teacher)
    batch = TrainingBatch(TOKENS, windows=torch.arange(BATCH))
    return lambda: _run(Trainer(learner, optimizer, lambda _: batch, TrainerSettings(STEPS, 1e-5), Nowhere()))


def bare(kind: str, dtype: torch.dtype) -> Callable[[], None]:
    """The same steps in a bare loop; ``float32`` computes under autocast."""
    student = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)

    def steps() -> None:
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                logits = student(input_ids=TOKENS, use_cache=False).logits.float()
            if kind == "text":
                loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            else:
                with torch.no_grad():
                    wanted = teacher(input_ids=TOKENS, use_cache=False).logits.float().log_softmax(-1)
                loss = (
                    functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum") / TOKENS.numel()
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def main() -> None:
    parser(__doc__).parse_args()
    rows = []
    for kind in ("teacher", "stored", "text"):
        runs = {
            "smelt": ours(kind),
            "bare, bfloat16": bare(kind, torch.bfloat16),
            "bare, autocast": bare(kind, torch.float32),
        }
        for run in runs.values():
            run()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        row: dict[str, Any] = {"learns from": kind, "threads": torch.get_num_threads()}
        for name, each in times.items():
            row[f"{name}, tokens/s"] = round(STEPS * BATCH * LENGTH / statistics.median(each))
            if name != "smelt":
                ratios = [theirs / mine for theirs, mine in zip(each, times["smelt"], strict=True)]
                row[f"smelt over {name}"] = round(statistics.median(ratios), 3)
        print(row, flush=True)
        rows.append(row)
    save("training_speed", "python -m benchmarks.training.speed", rows)


def _opened() -> OpenModel:
    return OpenModel(find_model("builtin:smelt-6m"))


def _run(trainer: Trainer) -> None:
    trainer.run()


if __name__ == "__main__":
    main()
