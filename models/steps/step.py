"""The joint between the pipeline and what a step does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...system.errors import Problem
from ...system.processes import Processes
from ...system.progress import Progress
from ...system.resources import Cost
from ..structure.open_model import OpenModel


@dataclass(frozen=True)
class RunContext:
    """What a step may use of the run around it.

    Attributes:
        dtype: what the model computes in while it is calibrated.
        tokens: calibration windows, token ids ``[samples, length]``; if no step reads text, a few random ones, which
            checks of what a step has made may run.
        seed: the run's, for whatever is random.
        journal: a directory of the step's own for finished parts; it survives a kill.
        progress: shows how far it is.
        processes: this one and those that share the work. All are given the same tokens.
        adapter: the fingerprint of what is merged into the model's files, if anything.
        original: the model that the run began with; None for one that is not part of a run.
        number: the step's place in the recipe.
    """

    dtype: torch.dtype
    tokens: Tensor
    seed: int
    journal: Path
    progress: Progress
    processes: Processes
    adapter: str | None = None
    original: OpenModel | None = None
    number: int = 0


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves for ``smelt.json`` and the report.

    Attributes:
        name: the step's kind.
        settings: its settings, as plain data.
        layers: one record a layer it changed: name, shape, scheme, error, notes.
        unknown: what it left alone because it is not understood.
        chosen: what it decided by measuring, as plain data; None if the recipe decided everything.
        done: what it did to the model, in sentences for the report, where the settings do not tell.
        retokenized: whether the model that it leaves has another tokenizer.
        training: the curve of what was trained, and text that was written meanwhile, as plain data.
    """

    name: str
    settings: dict[str, Any]
    layers: list[dict[str, Any]]
    unknown: list[str]
    chosen: dict[str, Any] | None = None
    done: list[str] = field(default_factory=list)
    retokenized: bool = False
    training: dict[str, Any] | None = None


class Step(Protocol):
    """One step of a recipe.

    Attributes:
        quantizes: whether what it leaves is quantized, so that no step can follow.
        leaves_zeros: whether it removes weights by making them zero.
        keeps_zeros: whether weights that are zero stay so.
    """

    quantizes: bool
    leaves_zeros: bool

    @property
    def keeps_zeros(self) -> bool: ...

    @property
    def label(self) -> str:
        """What it does, in a few words, to call the result by."""
        ...

    def check(self, model: OpenModel) -> list[Problem]:
        """All that can be known to be wrong before any work."""
        ...

    def reads_text(self, model: OpenModel) -> list[str]:
        """What of it asks for the calibration text, in a few words each; nothing if it needs none."""
        ...

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        """Memory, disk and operations it will take."""
        ...

    def plan(self, model: OpenModel) -> dict[str, Any]:
        """What it will do, in numbers, and as a sentence, for the plan that ``--dry-run`` prints."""
        ...

    def outlook(self, model: OpenModel) -> OpenModel:
        """The model that the next step will be given, as far as its shapes are known before any work."""
        ...

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        """Do it: read ``model``, write a model directory at ``target``."""
        ...

    def help(self, model: OpenModel, context: RunContext) -> None:
        """Do a share of it in a process that writes nothing, while the first one runs it."""
        ...
