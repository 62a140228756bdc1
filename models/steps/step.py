"""What the pipeline and the plan know of a step: it is prepared once for a model, and then gives its cost and plan, and runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

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
        number: the step's place in the recipe.
    """

    dtype: torch.dtype
    tokens: Tensor
    seed: int
    journal: Path
    progress: Progress
    processes: Processes
    adapter: str | None = None
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
        done: what it did to the model, in sentences for the report, beyond what the settings say.
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


@dataclass(frozen=True)
class Given:
    """What a step is given to work on.

    Attributes:
        model: the model; before a run, of the shapes that the step before leaves in the worst case.
        original: the model that the run began with.
        on_gpu: whether what calibrates and trains is in another memory than the model's files are read into.
    """

    model: OpenModel
    original: OpenModel
    on_gpu: bool = False


class Step(Protocol):
    """One step of a recipe, by its settings alone.

    Attributes:
        quantizes: whether what it leaves is quantized, so that no step can follow.
        leaves_zeros: whether it removes weights by making them zero.
        keeps_zeros: whether weights that are zero stay so.
        label: what it does, in a few words, to call the result by.
    """

    quantizes: bool
    leaves_zeros: bool

    @property
    def keeps_zeros(self) -> bool: ...

    @property
    def label(self) -> str: ...

    def prepare(self, given: Given) -> PreparedStep:
        """Work out once what its cost, its plan and its run need. Reads headers, no weights.

        Raises:
            ProblemsError: all that can be known to be wrong before any work.
        """
        ...


class PreparedStep(ABC):
    """A step and the model that it will work on.

    Attributes:
        model: what it works on.
        output: the model that the next step will be given, as far as its shapes are known before any work: the worst case.
        reads_text: what of it asks for the calibration text, in a few words each; empty if nothing does.
        learns_from_original: whether the model that the run began with teaches it.
        stored: what a quantize step will store; None for a step that leaves plain weights.
    """

    model: OpenModel
    output: OpenModel
    reads_text: Sequence[str] = ()
    learns_from_original: bool = False
    stored: StoragePlan | None = None

    @abstractmethod
    def cost(self, windows: int, length: int) -> Cost:
        """Memory, disk and operations it will take, with so many windows of calibration text."""

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """What it will do, in numbers, and as a sentence, for the plan that ``--dry-run`` prints."""

    @abstractmethod
    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        """Do it, in every process: the main one writes a model directory at ``target``.

        Returns:
            What was done; None in processes that write nothing.
        """


@dataclass(frozen=True)
class StoragePlan:
    """What a quantize step will store, as far as it is known before any work.

    Attributes:
        model: with the weights that are stored: a quantized head has a weight of its own.
        schemes: by linear, what it will be stored as: one scheme, or those that measuring chooses from.
        embedding: whether the input embedding is stored in codes.
        kv_cache: compressed-tensors' arguments of the cache of keys and values; None for as they are computed.
    """

    model: OpenModel
    schemes: Mapping[str, Sequence[Any]]
    embedding: bool
    kv_cache: Any
