"""The recipe's `evaluate` section: how the result is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ...models.text.settings import LENGTH_HELP, fitting_length
from ...models.text.text_source import TextSource
from ...runtime import EngineConfig
from ...system.settings.recipe_model import PathText, RecipeModel

# What a recipe calls the checkpoint that it makes.
RESULT = "result"


class SpeedSettings(RecipeModel):
    """The load of the speed measurement."""

    prompt: int = Field(default=128, ge=1, description="Tokens per prompt.")
    generate: int = Field(default=64, ge=2, description="Tokens generated per request.")
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        default=[1, 8],
        min_length=1,
        description="Numbers of concurrent requests, measured one after another; a single request is always measured.",
    )
    repeats: int = Field(
        default=6,
        ge=1,
        description="Rounds, in each of which the models take turns; medians are reported. Intervals need at least six.",
    )

    def engine(self, config: EngineConfig) -> EngineConfig:
        """How checkpoints are computed, changed for the load."""
        return replace(
            config,
            max_model_len=self.prompt + self.generate + 1,
            max_num_seqs=max(1, *self.concurrency),
            enable_prefix_caching=False,
            quiet=True,
        )

    def within(self, positions: int) -> SpeedSettings | Literal[False]:
        """The same load, shortened to a model's maximum positions; False if no prompt fits."""
        generate = min(self.generate, positions // 3)
        prompt = min(self.prompt, positions - 1 - generate)
        return self.model_copy(update={"prompt": prompt, "generate": generate}) if generate >= 2 else False


class Evaluate(RecipeModel):
    """How the compressed model is compared with the original."""

    text: PathText = Field(
        default="builtin", description="`builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
    windows: int = Field(default=64, ge=1, description="Maximum number of text windows.")
    length: int = Field(default=256, ge=2, description=LENGTH_HELP)
    field: str = Field(
        default="text",
        description="Name of the field in JSONL and datasets that holds text, or conversations (lists of messages).",
    )
    split: str = Field(default="test", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    tasks: list[PathText] = Field(
        default=[], description="lm-eval tasks: names (`smelt_last_word` needs no network) or paths of YAML files."
    )
    trust_task_code: bool = Field(
        default=False,
        description="Run Python code that the tasks' YAML files refer to, and what a model writes where a task runs it. Off by default.",
    )
    limit: int | None = Field(default=None, ge=1, description="Maximum items per task; default: all.")
    fewshot: int | None = Field(default=None, ge=0, description="Few-shot examples per prompt; default: the task's.")
    guarantee: list[str] = Field(
        default=[],
        description="Claims on losses beside the original, such as `acc loss <= 1% @95%`, to be certified; measuring stops when they are.",
    )
    drafter: PathText | None = Field(
        default=None,
        description="Measure what speculative decoding gains: `lookup`, `nested`, `early-exit:N`, a checkpoint, in a recipe `result`; or `lookup+` and one of the others.",
    )
    samples: int = Field(default=4, ge=0, le=1000, description="Prompts whose continuations are shown side by side.")
    speed: SpeedSettings | Literal[False] = Field(
        default_factory=SpeedSettings, description="The load of the speed measurement; false to skip it."
    )
    device: str = Field(
        default="cpu",
        description="Device of the evaluation: `cpu`, or `cuda` for a GPU. Originals that are streamed are evaluated on the CPU.",
    )
    tp: int = Field(default=1, ge=1, description="Processes that divide each layer between them (tensor parallelism).")
    pp: int = Field(default=1, ge=1, description="Processes that have some of the layers each (pipeline parallelism).")

    def within(self, positions: int | None) -> Evaluate:
        """The same settings for a model's maximum positions: default length and load are shortened to fit."""
        fitting: dict[str, Any] = dict(fitting_length(self, positions))
        if self.speed and positions is not None and "speed" not in self.model_fields_set:
            fitting["speed"] = self.speed.within(positions)
        return self.model_copy(update=fitting)

    def engine(self, *, trust_remote_code: bool) -> EngineConfig:
        """How checkpoints are computed.

        Args:
            trust_remote_code: run their own Python.
        """
        return EngineConfig(device=self.device, tp=self.tp, pp=self.pp, trust_remote_code=trust_remote_code, quiet=True)

    def source(self) -> TextSource:
        """The text."""
        return TextSource(self.text, "evaluation", self.field, self.split, self.config)
