"""The recipe's sections about training: distillation, and training under quantization."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..models.text.text_source import TextSource
from ..system.settings import Chosen, PathText, RecipeModel, choice_schema
from .losses.table import LOSSES

_LARGE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def _count(value: Any) -> Any:
    """``400k`` as 400000."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmb]?)", value.strip().lower())
        if found is None:
            raise ValueError(f"{value!r} is no number of tokens; write one such as 400000, 400k or 2.5M")
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
    """What is trained on."""

    source: PathText = Field(
        default="builtin", description="`builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
    field: str = Field(default="text", description="The field that holds the text in JSONL and datasets.")
    split: str = Field(default="train", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    writer: Literal["text", "teacher", "student"] = Field(
        default="text",
        description="Who goes on after a window's first tokens: the `text` itself; the `teacher`, once, before training; or"
        " the `student` as it is at each step (on-policy, GKD), of whose text only what it wrote counts.",
    )
    prompt: int = Field(default=32, ge=1, description="Tokens of each window that a teacher or student is given.")
    temperature: float = Field(default=1.0, ge=0, description="Of what is written; 0 for the most likely tokens.")
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="The share of steps that read the student's own text; the others read the text.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    def text(self) -> TextSource:
        """The text."""
        return TextSource(self.source, "calibration", self.field, self.split, self.config)


TextField = Annotated[TrainingText, WithJsonSchema({"anyOf": [{"type": "string"}, TrainingText.model_json_schema()]})]


class Training(RecipeModel):
    """How a model is trained."""

    teacher: PathText = Field(
        default="original",
        description="Whom to learn from: the recipe's `original` model, or a directory or hub name of one with the same"
        " tokenizer.",
    )
    tokens: Count = Field(ge=1, description="How many are read, such as `400k`; a shorter text is read several times.")
    data: TextField = Field(default_factory=TrainingText, description="What is trained on: a name, or {source: …}.")
    length: int = Field(default=256, ge=2, description="Tokens a window.")
    batch: int = Field(default=16, ge=1, description="Windows a step.")
    accumulate: int = Field(
        default=1, ge=1, description="Passes that a step is made in, with so much less memory; they divide the batch."
    )
    checkpointing: bool = Field(
        default=False,
        description="Keep only what enters blocks and compute the rest again: less memory, a third slower.",
    )
    loss: LossField = Field(
        default_factory=lambda: LossChoice(method="forward_kl"),
        description="How far the student is from the teacher: a name, or {method: …, option: …}.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Of both distributions in the loss.")
    cross_entropy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of the text's own next tokens in the loss; at 1 no teacher is needed.",
    )
    hidden: float = Field(
        default=0.0, ge=0, description="How much the distance of hidden states from the teacher's counts besides."
    )
    attention: float = Field(
        default=0.0, ge=0, description="How much the divergence of attention from the teacher's counts besides."
    )
    stored: int | None = Field(
        default=None,
        ge=1,
        description="Ask the teacher once, before training, and keep so many of its most likely tokens for every position:"
        " for text that is read several times. Absent for a teacher that reads along.",
    )
    stored_at: PathText | None = Field(
        default=None,
        description="A directory in which several runs find what is stored of the same teacher and text. Absent for the run's"
        " own.",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="At the peak.")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        default="cosine", description="How it goes on after the warm-up."
    )
    warmup: float = Field(default=0.05, ge=0, lt=1, description="The share of the steps until the peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="Of matrices, by AdamW.")
    clip: float | None = Field(default=1.0, gt=0, description="The largest norm of a gradient; null for any.")
    average: float | None = Field(
        default=None, gt=0, lt=1, description="The decay of an average of the weights, which then is the result."
    )
    skip_spikes: float | None = Field(
        default=None, gt=1, description="Pass over a step whose gradient is so many times the usual one."
    )
    small_states: bool = Field(default=False, description="Keep the optimizer's moments in eight bits.")

    @model_validator(mode="after")
    def _fits_together(self) -> Training:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate {self.accumulate} does not divide the batch of {self.batch}")
        if self.tokens < self.length * self.batch:
            raise ValueError(
                f"{self.tokens} tokens are less than one step of {self.batch} windows of {self.length}; ask for more, or"
                " for smaller batches"
            )
        if self.stored is not None and self.loss.method != "forward_kl":
            raise ValueError(f"stored keeps what forward_kl needs; {self.loss.method} needs a teacher that reads along")
        if self.data.writer != "text" and self.data.prompt >= self.length:
            raise ValueError(
                f"a prompt of {self.data.prompt} tokens leaves nothing to write in a window of {self.length}"
            )
        if self.data.writer != "text" and not self.has_teacher:
            raise ValueError(f"writer: {self.data.writer} needs a teacher, and with cross_entropy: 1 there is none")
        if self.data.writer == "student" and (self.cross_entropy or self.stored is not None):
            raise ValueError(
                "what the student writes is no text to learn from, and no teacher has seen it before; remove cross_entropy"
                " and stored, or let the writer be the text or the teacher"
            )
        if self.data.share != 1 and self.data.writer != "student":
            raise ValueError("share is for writer: student; remove it")
        if (self.hidden or self.attention) and self.stored is not None:
            raise ValueError(
                "hidden states and attention are compared with a teacher that reads along; remove stored, or hidden and"
                " attention"
            )
        if self.stored_at is not None and self.stored is None:
            raise ValueError("stored_at says where it is stored; say how many tokens a position with stored, too")
        if self.cross_entropy == 1 and (self.hidden or self.attention or self.stored is not None):
            raise ValueError("with cross_entropy: 1 there is no teacher, so remove hidden, attention and stored")
        return self

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher takes part."""
        return self.cross_entropy < 1

    @property
    def learns_from_original(self) -> bool:
        """Whether the teacher is the model that the run began with."""
        return self.has_teacher and self.teacher == "original"

    @property
    def label(self) -> str:
        """For people: ``forward_kl on 400k tokens``."""
        return f"{self.loss.method if self.has_teacher else 'cross-entropy'} on {_short(self.tokens)} tokens"

    @property
    def steps(self) -> int:
        """How many steps the tokens are read in."""
        return -(-self.tokens // (self.length * self.batch))


class Distill(Training):
    """Train the model, as it is now, to predict what a teacher predicts."""

    student: Literal["trained", "random"] = Field(
        default="trained",
        description="What training starts from: the weights as they are, or random ones of the same shape.",
    )


class TrainQuantized(Training):
    """Train a model while its weights are rounded (quantization-aware training)."""

    learning_rate: float = Field(default=1e-4, gt=0, description="At the peak.")
    scales: float = Field(
        default=10.0,
        ge=0,
        description="How fast scales are learned, as a factor of the learning rate (LSQ); 0 to leave them as they are.",
    )
    lora: int | None = Field(
        default=None,
        ge=1,
        description="Train a product of two matrices of this rank beside each weight, not the weight.",
    )


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
