"""The interface of a step: it is prepared once for a model, then gives its cost and plan, and runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...system.errors import Problem
from ...system.hardware.resources import Cost
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ..structure.open_model import OpenModel


@dataclass(frozen=True)
class RunContext:
    """What a step may use of the run around it.

    Attributes:
        dtype: what the model computes in while it is calibrated.
        tokens: calibration windows, token ids ``[samples, length]``; if no step reads text, a few random ones for
            checks of a step's result.
        seed: the run's random seed.
        journal: a directory of the step's own for finished parts; it survives a kill.
        progress: shows how far it is.
        processes: this one and the others that share the work. All get the same tokens.
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
        layers: one record per changed layer: name, shape, scheme, error, notes.
        unknown: what it left unchanged because it is unknown.
        chosen: what it decided by measuring, as plain data; None if the recipe decided everything.
        done: what it did to the model, in sentences for the report, beyond what the settings say.
        retokenized: whether the resulting model has another tokenizer.
        training: the training curve, and sample text written during training, as plain data.
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
class RecipeStepPlan:
    """What a step will do, for the plan that ``--dry-run`` prints.

    Attributes:
        step: the step's kind.
        facts: what it does, as plain data.
        bytes_before: bytes of what it changes.
        bytes_after: the same afterwards.
        sentence: all this in a sentence.
        unchanged_bytes: bytes of the resulting checkpoint that ``bytes_after`` does not count.
        stays_packed: whether transformers computes with the weights as they are stored.
        more: further facts.
    """

    step: str
    facts: Mapping[str, Any]
    bytes_before: int
    bytes_after: int
    sentence: str = ""
    unchanged_bytes: int = 0
    stays_packed: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the resulting checkpoint."""
        return self.bytes_after + self.unchanged_bytes

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "step": self.step,
            **self.facts,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "checkpoint_bytes": self.checkpoint_bytes,
            "stays_packed": self.stays_packed,
            **self.more,
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class Given:
    """The input of a step.

    Attributes:
        model: the model; before a run, with the worst-case shapes that the previous step leaves.
        original: the model that the run started from.
        on_gpu: whether calibration and training use another memory than the one that the model's files are read into.
    """

    model: OpenModel
    original: OpenModel
    on_gpu: bool = False


@dataclass(frozen=True)
class StepTraining:
    """A step's training, as far as the run around it asks.

    Attributes:
        teacher: the teacher's name in the recipe; None for the model that the run started from, or no teacher.
        sharing_problems: problems of splitting it over a number of processes, given the model that the run starts from,
            if that can be opened.
    """

    teacher: str | None
    sharing_problems: Callable[[OpenModel | None, int], list[Problem]]


Settings = TypeVar("Settings")


class Step(ABC, Generic[Settings]):
    """One step of a recipe, by its settings alone.

    Args:
        settings: the recipe's section.
        where: how messages name this step.

    Attributes:
        quantizes: whether its result is quantized, so that no step can follow.
        leaves_zeros: whether it removes weights by setting them to zero.
    """

    quantizes = False
    leaves_zeros = False

    def __init__(self, settings: Settings, where: str) -> None:
        self.settings, self.where = settings, where

    @property
    @abstractmethod
    def label(self) -> str:
        """What it does, in a few words, used to name the result."""

    @property
    def changes_zeros(self) -> str | None:
        """The setting by which it changes all weights, zeros too; None if those stay zero."""
        return None

    @property
    def training(self) -> StepTraining | None:
        """Its training, if it has one."""
        return None

    @abstractmethod
    def prepare(self, given: Given) -> PreparedStep:
        """Compute once what its cost, plan and run need. Reads headers, no weights.

        Raises:
            ProblemsError: all problems that can be found before any work.
        """


class PreparedStep(ABC):
    """A step and its input model.

    Attributes:
        model: what it works on.
        output: the next step's input model, with the worst-case shapes known before any work.
        reads_text: its parts that need the calibration text, in a few words each; empty if none does.
        learns_from_original: whether the model that the run started from is its teacher.
        stored: what a quantize step will store; None for a step that leaves plain weights.
    """

    model: OpenModel
    output: OpenModel
    reads_text: Sequence[str] = ()
    learns_from_original: bool = False
    stored: StoragePlan | None = None

    @abstractmethod
    def cost(self, windows: int, length: int) -> Cost:
        """Memory, disk and operations it will take with a given number of calibration windows."""

    @abstractmethod
    def plan(self) -> RecipeStepPlan:
        """What it will do, in numbers, and as a sentence."""

    @abstractmethod
    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        """Run it, in every process: the main one writes a model directory at ``target``.

        Returns:
            What was done; None in processes that write nothing.
        """


@dataclass(frozen=True)
class StoragePlan:
    """What a quantize step will store, as far as it is known before any work.

    Attributes:
        model: with the weights that are stored: a quantized lm_head is untied.
        schemes: each linear's scheme, or the candidates that measuring chooses from.
        embedding: whether the input embedding is stored in codes.
        kv_cache: compressed-tensors' arguments of the KV cache; None for an unquantized cache.
    """

    model: OpenModel
    schemes: Mapping[str, Sequence[Any]]
    embedding: bool
    kv_cache: Any
