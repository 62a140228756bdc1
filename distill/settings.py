"""The recipe's sections about training: distillation and quantization-aware training."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..models.steps.settings import StepSettings
from ..models.text.text_source import TextSource
from ..system.settings.recipe_model import Chosen, PathText, RecipeModel, choice_schema
from .losses.table import LOSSES

_LARGE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def _count(value: Any) -> Any:
    """``400k`` as 400000."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmb]?)", value.strip().lower())
        if found is None:
            raise ValueError(f"{value!r} is not a number of tokens; write for example 400000, 400k or 2.5M")
        return round(float(found[1]) * _LARGE[found[2]])
    return value


Count = Annotated[
    int,
    BeforeValidator(_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\d+(\.\d+)?\s*[kKmMbB]?$"}]}
    ),
]


class LossChoice(Chosen):
    """A loss and its options."""

    kind = "loss"
    table = MappingProxyType(LOSSES)


LossField = Annotated[LossChoice, WithJsonSchema(choice_schema(LOSSES))]


class TrainingText(RecipeModel):
    """The training text."""

    source: PathText = Field(
        default="builtin", description="`builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
    field: str = Field(
        default="text",
        description="Name of the text field in JSONL and datasets. It may hold lists of chat messages instead, which are"
        " written in the model's chat template, and of which the assistant's are learned.",
    )
    completion: str | None = Field(
        default=None,
        description="Name of the field with what is to be learned, if `field` is the prompt that it follows.",
    )
    split: str = Field(default="train", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    writer: Literal["text", "teacher", "student"] = Field(
        default="text",
        description="Source of the tokens after a window's prompt: the `text` itself; the `teacher`, once, before training;"
        " or the current `student` at each step (on-policy, GKD), where the loss covers only the generated tokens.",
    )
    prompt: int = Field(
        default=32, ge=1, description="Prompt tokens from each window, if a teacher or student continues it."
    )
    temperature: float = Field(
        default=1.0, ge=0, description="Sampling temperature of the generated text; 0 for greedy."
    )
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of steps that train on the student's own text; the others use the text itself.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    def text(self) -> TextSource:
        """The text."""
        return TextSource(self.source, "calibration", self.field, self.split, self.config, self.completion)


TextField = Annotated[TrainingText, WithJsonSchema({"anyOf": [{"type": "string"}, TrainingText.model_json_schema()]})]


class Training(RecipeModel):
    """How a model is trained."""

    teacher: PathText = Field(
        default="original",
        description="The teacher: the recipe's `original` model, or the directory or hub name of a model with the same"
        " tokenizer.",
    )
    tokens: Count = Field(ge=1, description="Training tokens in total, such as `400k`; a shorter text is repeated.")
    data: TextField = Field(default_factory=TrainingText, description="Training text: a name, or {source: …}.")
    length: int = Field(default=256, ge=2, description="Tokens per window.")
    batch: int = Field(default=16, ge=1, description="Windows per step.")
    accumulate: int = Field(
        default=1, ge=1, description="Gradient accumulation: passes per step, which must divide the batch."
    )
    checkpointing: bool = Field(
        default=False,
        description="Activation checkpointing: keep only the inputs of blocks and recompute the rest; a third slower.",
    )
    loss: LossField = Field(
        default_factory=lambda: LossChoice(method="forward_kl"),
        description="Distillation loss: a name, or {method: …, option: …}.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Temperature of both distributions in the loss.")
    cross_entropy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Weight of cross-entropy on the text in the loss, from 0 to 1; 1 needs no teacher.",
    )
    hidden: float = Field(
        default=0.0, ge=0, description="Weight of an added loss on the distance of hidden states from the teacher's."
    )
    attention: float = Field(
        default=0.0, ge=0, description="Weight of an added loss on the divergence of attention from the teacher's."
    )
    stored: int | None = Field(
        default=None,
        ge=1,
        description="Run the teacher once, before training, and cache this many top logits per position; useful if the text"
        " is read several times. By default the teacher runs at every step.",
    )
    stored_at: PathText | None = Field(
        default=None,
        description="Directory where several runs share the cached logits of one teacher and text; default: the run's own.",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        default="cosine", description="Learning rate schedule after the warm-up."
    )
    warmup: float = Field(default=0.05, ge=0, lt=1, description="Fraction of the steps before the peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay of matrices.")
    clip: float | None = Field(default=1.0, gt=0, description="Maximum gradient norm; null for no clipping.")
    average: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, which becomes the result.",
    )
    keep: Literal["last", "best"] = Field(
        default="last",
        description="Which weights become the result: the `last`, or those with the lowest loss on held-out text (`best`).",
    )
    skip_spikes: float | None = Field(
        default=None, gt=1, description="Skip a step whose gradient norm is this many times the recent median."
    )
    small_states: bool = Field(default=False, description="Store the optimizer's moments in 8 bits.")

    @model_validator(mode="after")
    def _fits_together(self) -> Training:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate {self.accumulate} does not divide the batch of {self.batch}")
        if self.tokens < self.length * self.batch:
            raise ValueError(
                f"{self.tokens} tokens are less than one step of {self.batch} windows of {self.length}; raise tokens or"
                " lower batch"
            )
        if self.stored is not None and LOSSES[self.loss.method].top is None:
            possible = " and ".join(name for name, loss in LOSSES.items() if loss.top is not None)
            raise ValueError(
                f"stored works with {possible} only; remove it, since {self.loss.method} needs all of the teacher's logits"
            )
        if self.data.writer != "text" and self.data.prompt >= self.length:
            raise ValueError(
                f"a prompt of {self.data.prompt} tokens leaves nothing to generate in a window of {self.length}"
            )
        if self.data.writer != "text" and not self.has_teacher:
            raise ValueError(f"writer: {self.data.writer} needs a teacher, but with cross_entropy: 1 there is none")
        if self.data.writer == "student" and (self.cross_entropy or self.stored is not None):
            raise ValueError(
                "writer: student excludes cross_entropy and stored, which need text that is known before training; remove"
                " them, or set writer: text or teacher"
            )
        if self.data.writer != "text" and self.data.completion is not None:
            raise ValueError(
                f"completion is the text to learn from, and with writer: {self.data.writer} that is written; remove one"
            )
        if self.data.share != 1 and self.data.writer != "student":
            raise ValueError("share is for writer: student; remove it")
        if (self.hidden or self.attention) and self.stored is not None:
            raise ValueError(
                "hidden and attention need a teacher that runs at every step; remove stored, or hidden and attention"
            )
        if self.keep == "best" and self.average is not None:
            raise ValueError("average and keep: best each choose the weights that become the result; remove one")
        if self.stored_at is not None and self.stored is None:
            raise ValueError("stored_at has no effect without stored; set stored, or remove stored_at")
        if self.cross_entropy == 1 and (self.hidden or self.attention or self.stored is not None):
            raise ValueError("with cross_entropy: 1 there is no teacher; remove hidden, attention and stored")
        return self

    @property
    def has_teacher(self) -> bool:
        """Whether the loss needs a teacher."""
        return self.cross_entropy < 1

    @property
    def learns_from_original(self) -> bool:
        """Whether the teacher is the recipe's model."""
        return self.has_teacher and self.teacher == "original"

    @property
    def label(self) -> str:
        """For messages and reports: ``forward_kl on 400k tokens``."""
        return f"{self.loss.method if self.has_teacher else 'cross-entropy'} on {_short(self.tokens)} tokens"

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return -(-self.tokens // (self.length * self.batch))


class Distill(Training, StepSettings):
    """Train the current model on a teacher's predictions."""

    student: Literal["trained", "random"] = Field(
        default="trained",
        description="Initial weights: the current ones, or random ones of the same shape.",
    )


class TrainQuantized(Training):
    """Train a model while its weights are rounded (quantization-aware training)."""

    learning_rate: float = Field(default=1e-4, gt=0, description="Peak learning rate.")
    scales: float = Field(
        default=10.0,
        ge=0,
        description="Learning rate of the scales, as a factor of the weights' (LSQ); 0 to keep them fixed.",
    )
    lora: int | None = Field(
        default=None,
        ge=1,
        description="Train a low-rank product of this rank added to each weight instead of the weight.",
    )


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
