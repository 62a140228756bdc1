"""Jobs of the GPU's stages on a device that launches nothing, which takes them where a rehearsal on a CPU does not go.

python -m tests.benchmarks.on_mock_gpu PART [PART ...]

Prints a line of JSON: the jobs that were done, and what failed. Needs a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # asks what a Generator is, which is another one below
from smelt.runtime.kernels.tools import tune, tune_linears

from benchmarks.gpu.place import Place

from ..runtime.kernels.mock_device import CUDA, Drawing, mock_device
from ..runtime.kernels.mock_driver import MockDriver
from ..runtime.kernels.rehearsal import choose

# transformers asks such a device for what it does not have.
_OF_TRANSFORMERS = ("logits of ", "transformers ")


def rehearse(parts: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Every job of some parts, on tiny shapes.

    Args:
        parts: their names.
        folder: for what they write.
    """
    done, failures = [], []
    place = Place(CUDA, rehearses=True, quick=False, runs=2, scratch=folder, output=folder / "output")
    (folder / "output").mkdir()
    json.dumps(place.facts())
    for name in parts:
        part: Any = importlib.import_module(f"benchmarks.gpu.parts.{name}")
        if name == "tuning":
            # The device's own file is the checkout's.
            tune.destination = lambda: Path(folder, "checkout.json")
            tune_linears.LinearTuning.rounds = 1  # type: ignore[assignment]
        for job in part.jobs(place):
            if job.key.startswith(_OF_TRANSFORMERS):
                continue
            try:
                rows = list(job.run(place))
                json.dumps([rows, job.about])
                assert rows, "no row came"
            except Exception as error:
                traceback.print_exc()
                failures.append(f"{name}, {job.key}: {type(error).__name__}: {error}")
            done.append(f"{name}, {job.key}")
        assert place.alive()
    return done, failures


def main() -> None:
    """Of the parts that are named."""
    driver = MockDriver().install()
    driver.seen = choose
    of_torch = torch.Generator

    def generator(device: Any = "cpu") -> torch.Generator:
        return Drawing() if torch.device(device).type == "cuda" else of_torch(device)

    with tempfile.TemporaryDirectory() as folder, mock_device():
        torch.Generator = generator  # type: ignore[misc, assignment]
        done, failures = rehearse(sys.argv[1:], Path(folder))
    print(json.dumps({"done": done, "failures": failures}))


if __name__ == "__main__":
    main()
