"""What training leaves beside weights: a table of every step, events for TensorBoard, and text that the model wrote."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...system.files import write_text
from ..training.trainer import StepMetrics

# How often the table is written, in seconds.
_TABLE_SECONDS = 5.0
# Points that a curve in a report has, at most.
_POINTS = 200


class TrainingLog:
    """Writes down how training goes.

    Args:
        directory: gets ``training-<name>.csv``, and ``tensorboard/<name>`` where TensorBoard is installed.
        name: of this training.
        steps: how many there will be.
    """

    def __init__(self, directory: Path, name: str, steps: int) -> None:
        self._table = directory / f"training-{name}.csv"
        self._events, self._steps = directory / "tensorboard" / name, steps
        self._written, self._taken, self._logged = 0.0, 0.0, 0
        self._writer: Any = None
        self._begun = (time.monotonic(), 0)

    def on_step(self, metrics: list[StepMetrics]) -> None:
        """Take note of a step."""
        # The table is written whole, which takes longer the longer it is.
        pause = max(_TABLE_SECONDS, 50 * self._taken)
        if len(metrics) == 1 or time.monotonic() - self._written > pause or len(metrics) == self._steps:
            self.write(metrics)
        if self._logged == 0:
            self._begun = time.monotonic(), metrics[-1].tokens

    def write(self, metrics: list[StepMetrics]) -> None:
        """Write the table as it is now."""
        begun = time.monotonic()
        if metrics:
            write_text(self._table, table(metrics))
            self._write_tensorboard(metrics)
        self._written = time.monotonic()
        self._taken = self._written - begun

    def line(self, metrics: list[StepMetrics]) -> str:
        """How it goes, in a few words for a progress bar."""
        if not metrics:
            return "training"
        last = metrics[-1]
        since, tokens = self._begun
        rate = (last.tokens - tokens) / max(1e-9, time.monotonic() - since)
        return f"training: loss {last.loss:.3f}, {rate:,.0f} tokens/s"

    def _write_tensorboard(self, metrics: list[StepMetrics]) -> None:
        if self._writer is None:
            if importlib.util.find_spec("tensorboard") is None:
                return
            from torch.utils.tensorboard import SummaryWriter

            # What a run that was killed had written beyond its last snapshot is passed over.
            self._writer = SummaryWriter(str(self._events), purge_step=len(metrics))
            self._logged = len(metrics) - 1
        for one in metrics[self._logged :]:
            for name, value in _columns(one).items():
                self._writer.add_scalar(name, value, one.step)
        self._logged = len(metrics)
        self._writer.flush()

    def close(self) -> None:
        """Nothing more will come."""
        if self._writer is not None:
            self._writer.close()


def table(metrics: list[StepMetrics]) -> str:
    """All steps as CSV; what was not measured is empty."""
    rows = [_columns(one) for one in metrics]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names)]
    lines += [",".join("" if row.get(name) is None else f"{row[name]:.9g}" for name in names) for row in rows]
    return "\n".join(lines) + "\n"


def curve(started: dict[str, float] | None, metrics: list[StepMetrics]) -> list[dict[str, Any]]:
    """What a report shows: evenly many steps, and all at which something was measured; not how long they took.

    A checkpoint keeps it, and two runs of a recipe make the same one. Times are in the table.
    """
    every = max(1, len(metrics) // _POINTS)
    shown = [m for i, m in enumerate(metrics) if i % every == 0 or m.held_out or i == len(metrics) - 1]
    found = [{"step": m.step, "tokens": m.tokens, "loss": m.loss, "held_out": m.held_out} for m in shown]
    if started:
        found.insert(0, {"step": 0, "tokens": 0, "loss": None, "held_out": started})
    return found


@torch.no_grad()
def continued(logits: Callable[[Tensor], Tensor], prompts: Tensor, count: int) -> Tensor:
    """Prompts ``[n, length]`` with the tokens that a model finds most likely, one after another.

    Args:
        logits: of the last position, ``[n, vocabulary]``, for tokens ``[n, length]``.
        prompts: what is continued.
        count: how many tokens are added.
    """
    tokens = prompts
    for _ in range(count):
        tokens = torch.cat((tokens, logits(tokens).argmax(-1, keepdim=True)), dim=1)
    return tokens


def _columns(one: StepMetrics) -> dict[str, float]:
    found: dict[str, float] = {"step": one.step, "tokens": one.tokens, "loss": one.loss}
    found |= {f"loss/{name}": value for name, value in one.parts.items()}
    found |= {"learning_rate": one.rate, "gradient_norm": one.norm, "seconds": one.seconds}
    found["skipped"] = float(one.skipped)
    return found | {f"held_out/{name}": value for name, value in (one.held_out or {}).items()}
