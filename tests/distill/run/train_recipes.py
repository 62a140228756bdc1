"""A script for a launcher: runs the recipes of a JSON file, each in an arrangement, and some only for a few steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.distill.training import trainer
from smelt.distill.training.trainer import Trainer

# Changes of what recipes/accelerate/one-node.yaml makes of the environment.
ARRANGEMENTS: dict[str, dict[str, str]] = {
    "copies": {"ACCELERATE_USE_FSDP": "false"},
    "sharded": {},
    "sharded, kept": {"FSDP_RESHARD_AFTER_FORWARD": "false"},
}


def train(recipe: dict[str, Any], steps: int | None) -> None:
    """Run a recipe; with ``steps``, interrupt it there, with a snapshot of the step before."""
    step = Trainer._step
    snapshot_seconds, snapshot_share = trainer._SNAPSHOT_SECONDS, trainer._SNAPSHOT_SHARE

    def stopping(self: Trainer, number: int) -> None:
        if number == steps:
            raise KeyboardInterrupt
        step(self, number)

    trainer._SNAPSHOT_SECONDS, trainer._SNAPSHOT_SHARE = 0.0, 1e9
    Trainer._step = stopping
    try:
        run(Recipe.model_validate(recipe), progress=False)
    except KeyboardInterrupt:
        assert steps is not None
    finally:
        Trainer._step = step
        trainer._SNAPSHOT_SECONDS, trainer._SNAPSHOT_SHARE = snapshot_seconds, snapshot_share


if __name__ == "__main__":
    as_launched = dict(os.environ)
    assert as_launched["ACCELERATE_USE_FSDP"] == "true"
    for job in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.update(as_launched | ARRANGEMENTS[job["arrangement"]])
        train(job["recipe"], job["steps"])
