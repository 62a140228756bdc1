"""The recipe's section about measuring the result."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...models.text.settings import LENGTH_HELP, fitting_length
from ...models.text.text_source import TextSource
from ...system.settings import PathText, RecipeModel


class SpeedSettings(RecipeModel):
    """The load that speed is measured with."""

    prompt: int = Field(default=128, ge=1, description="Tokens of each prompt.")
    generate: int = Field(default=64, ge=2, description="Tokens to generate for each.")
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        default=[1, 8], min_length=1, description="Requests in flight, one load each; one alone is measured always."
    )
    repeats: int = Field(
        default=6,
        ge=1,
        description="Rounds; models take turns in each, medians are given, and six are enough for intervals.",
    )

    def within(self, positions: int) -> SpeedSettings | Literal[False]:
        """The same load, shorter where a model has fewer positions; False if no prompt is left."""
        generate = min(self.generate, positions // 3)
        prompt = min(self.prompt, positions - 1 - generate)
        return self.model_copy(update={"prompt": prompt, "generate": generate}) if generate >= 2 else False


class Evaluate(RecipeModel):
    """What the compressed model is compared on with the original."""

    text: PathText = Field(
        default="builtin", description="`builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
    windows: int = Field(default=64, ge=1, description="Most windows of text to read.")
    length: int = Field(default=256, ge=2, description=LENGTH_HELP)
    field: str = Field(default="text", description="The field that holds the text in JSONL and datasets.")
    split: str = Field(default="test", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    tasks: list[PathText] = Field(
        default=[], description="lm-eval tasks: names (`smelt_last_word` needs no network) or paths of YAML files."
    )
    trust_task_code: bool = Field(
        default=False, description="Run Python that the YAML files of tasks name. Off unless asked for."
    )
    limit: int | None = Field(default=None, ge=1, description="Most items of a task; absent for all.")
    fewshot: int | None = Field(default=None, ge=0, description="Examples in each prompt; absent for the task's own.")
    samples: int = Field(default=4, ge=0, le=1000, description="Prompts whose continuations are shown side by side.")
    speed: SpeedSettings | Literal[False] = Field(
        default_factory=SpeedSettings, description="The load to measure speed with; false for none."
    )
    device: str = Field(
        default="cpu",
        description="What reads, answers and is measured: `cpu`, or `cuda` for a GPU. Streamed originals are read on the CPU.",
    )

    def within(self, positions: int | None) -> Evaluate:
        """The same for a model of so many positions: a length and a load that were not chosen are none that do not fit."""
        fitting: dict[str, Any] = dict(fitting_length(self, positions))
        if self.speed and positions is not None and "speed" not in self.model_fields_set:
            fitting["speed"] = self.speed.within(positions)
        return self.model_copy(update=fitting)

    def source(self) -> TextSource:
        """The text."""
        return TextSource(self.text, "evaluation", self.field, self.split, self.config)
