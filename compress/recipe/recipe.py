"""The recipe's schema: strict pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ...distill.settings import Distill
from ...models.steps.settings import StepSettings
from ...models.text.settings import LENGTH_HELP, fitting_length
from ...prune.steps.table import Prune
from ...system.settings.checked import checked
from ...system.settings.recipe_model import PathText, RecipeModel, Seed
from ..evaluation.settings import Evaluate
from ..steps.settings import QuantizeSection
from .file import load


class Calibrate(RecipeModel):
    """The calibration text."""

    source: PathText = Field(
        default="builtin",
        description="`builtin`, `self` (the model writes its own text), a .txt or .jsonl file, or a Hugging Face dataset.",
    )
    samples: int = Field(default=64, ge=1, description="Number of text windows.")
    length: int = Field(default=256, ge=2, description=LENGTH_HELP)
    field: str = Field(
        default="text",
        description="Name of the field in JSONL and datasets that holds text, or conversations (lists of messages).",
    )
    split: str = Field(default="train", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="Device of calibration and rounding: `cpu`, or `cuda` for a GPU; each of several processes uses its own GPU.",
    )


class StepEntry(RecipeModel):
    """One step of a recipe: a mapping with exactly one key, the step's name."""

    quantize: QuantizeSection | None = None
    prune: Prune | None = None
    distill: Distill | None = None

    @model_validator(mode="after")
    def _one_step(self) -> StepEntry:
        if len(self._given()) != 1:
            *others, last = type(self).model_fields
            raise ValueError(f"a step has exactly one key: {', '.join(others)} or {last}")
        return self

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def step_name(self) -> str:
        """The step's name."""
        return self._given()[0]

    @property
    def settings(self) -> StepSettings:
        """The step's section."""
        return getattr(self, self.step_name)

    @model_serializer(mode="wrap")
    def _named_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: settings for name, settings in handler(self).items() if settings is not None}


class Recipe(RecipeModel):
    """A model, the steps to run on it, and the output directory.

    Load one with :meth:`load`, which reports all mistakes in the file at once, each with its line.
    """

    model: PathText = Field(description="A directory, a Hugging Face hub name, or builtin:smelt-6m.")
    adapter: PathText | None = Field(
        default=None,
        description="Directory of a LoRA adapter saved by peft, merged into the model before the first step; the model may"
        " then be a compressed checkpoint.",
    )
    output: PathText = Field(description="Output directory, for checkpoint/, report.* and journal/.")
    seed: Seed = Field(
        default=0, description="Random seed, for example of calibration windows and self-generated text."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Off by default."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    calibrate: Calibrate = Field(default_factory=Calibrate)
    steps: list[StepEntry] = Field(min_length=1, description="Steps, run in order.")
    evaluate: Evaluate | Literal[False] = Field(
        default_factory=Evaluate, description="Evaluation of the result; false to skip it."
    )

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Recipe:
        """Read a YAML recipe.

        Args:
            path: the file. ``extends: other.yaml`` in it is resolved relative to the file.
            overrides: ``key=value`` settings such as ``steps.0.quantize.scheme=W8A16``.

        Raises:
            SmeltError: with one line per mistake.
        """
        return load(cls, Path(path), overrides or [])

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Recipe:
        """A recipe from its sections.

        Raises:
            SmeltError: with one line per mistake.
        """
        return checked(cls, data, lambda place, what: f"{place or 'recipe'}: {what}")

    @model_validator(mode="after")
    def _enough_calibration(self) -> Recipe:
        for number, entry in enumerate(self.steps):
            problem = entry.settings.calibration_problem(self.calibrate.samples)
            if problem is not None:
                raise ValueError(f"steps.{number}.{entry.step_name}.{problem}")
        return self

    def within(self, positions: int | None) -> Recipe:
        """The same recipe for a model's maximum positions: default lengths are shortened to fit."""
        calibrate = self.calibrate.model_copy(update=fitting_length(self.calibrate, positions))
        evaluate = self.evaluate and self.evaluate.within(positions)
        return self.model_copy(update={"calibrate": calibrate, "evaluate": evaluate})

    def content(self) -> dict[str, Any]:
        """The recipe as plain data without the output directory: everything that determines the result's bytes."""
        return self.model_dump(mode="json", exclude={"output"})
