"""What a report holds of each model.

A number that was not measured is absent (``null``), never zero. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]


class Part(BaseModel):
    """Base of all parts of a report."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Spread(Part):
    """A quantity that was measured several times."""

    median: float
    values: list[float] = Field(description="Every repeat, in the order they were taken; models take turns.")

    @property
    def range(self) -> Interval:
        """The smallest and the largest."""
        return min(self.values), max(self.values)


class Machine(Part):
    """Where the numbers come from."""

    processor: str
    cores: int = Field(description="That this process may use.")
    threads: int = Field(description="That computed.")
    memory_bytes: int
    system: str
    measured_on: str | None = Field(default=None, description="The day, in UTC, on which speed was measured.")
    device: str = Field(description="What computed: `cpu`, or the name of a GPU.")
    read_bytes_per_second: float | None = Field(
        default=None, description="Reading memory, measured in this run; on a GPU of a copy, read and written."
    )
    operations_per_second: float | None = Field(
        default=None, description="Of a matrix product in `operations_dtype`, measured in this run."
    )
    operations_dtype: str | None = None


class Size(Part):
    """What a checkpoint takes on the disk."""

    bytes: int = Field(description="Of all tensors.")
    parameters: int
    bits_per_weight: float = Field(description="Over all parameters, scales included.")
    linear_bits_per_weight: float | None = Field(default=None, description="Over quantized linears only.")


class Text(Part):
    """How well a model predicts a text."""

    source: str
    windows: int
    length: int = Field(description="Tokens of a window; each is read from its own beginning.")
    perplexity: float = Field(description="exp of the mean negative log-likelihood a token.")
    perplexity_interval: Interval | None = Field(default=None, description="95%, over windows.")
    bits_per_byte: float = Field(description="Comparable between tokenizers, unlike perplexity.")
    nll: list[float] = Field(description="Negative log-likelihood of each window, in nats, summed over its tokens.")
    bytes: list[int] = Field(description="UTF-8 bytes that the predicted tokens of each window stand for.")
    text_sha256: str = Field(description="Of the tokens; equal where two models read the same.")
    source_sha256: str = Field(description="Of the beginning of the text; equal where two models read the same text.")
    computed_by: str


class TaskResult(Part):
    """One metric of one lm-eval task."""

    task: str
    metric: str
    filter: str
    value: float
    interval: Interval | None = Field(default=None, description="95%, over items.")
    higher_is_better: bool
    aggregation: str = Field(description="From items to the value, by lm-eval's name.")
    items: int
    by_item: list[Any] = Field(description="What each item contributed, in the task's order.")
    fewshot: int
    version: str
    group: str | None = Field(default=None, description="The group it is part of, whose own value stands for it.")


class Load(Part):
    """A number of requests kept in flight."""

    concurrency: int
    requests: int = Field(description="Of each repeat.")
    output_rate: Spread = Field(description="Generated tokens a second, over all requests.")
    first_token_p50: Spread
    first_token_p99: Spread
    between_tokens_p50: Spread
    between_tokens_p99: Spread


class TimePart(Part):
    """A share of a step."""

    name: str
    seconds: float


class Speed(Part):
    """How fast a checkpoint runs."""

    prompt: int
    generate: int
    first_token: Spread = Field(description="One request alone: from its arrival to its first token.")
    prefill_rate: Spread = Field(description="Prompt tokens a second, alone.")
    decode_rate: Spread = Field(description="Generated tokens a second after the first, alone.")
    loads: list[Load]
    load_seconds: float = Field(
        description="Reading the weights and making an engine of them; libraries are imported already, and files may be in the system's cache. On a GPU kernels are compiled meanwhile, unless they were before."
    )
    peak_memory_bytes: int | None = Field(
        default=None, description="Resident, of a process that only serves this; on a GPU, what it took there."
    )
    interleaved: bool = Field(description="Whether models took turns, so that the machine's moods hit all alike.")
    decode_bytes_per_token: int = Field(description="Weights read for a token.")
    decode_limit: float | None = Field(default=None, description="Tokens a second if reading weights were all.")
    decode_of_limit: float | None = None
    prefill_limit: float | None = Field(
        default=None,
        description="Tokens a second at the machine's product rate in `operations_dtype`; integers may exceed it.",
    )
    prefill_of_limit: float | None = None
    decode_time: list[TimePart] = Field(description="Where the time of a decoding step goes; empty for a GPU.")
    prefill_time: list[TimePart] = Field(description="Where the time of a prompt goes; empty for a GPU.")
    kernels: dict[str, str] = Field(description="What computes each linear.")


class Sample(Part):
    """What a model makes of a prompt, always taking the most likely token."""

    prompt: str
    text: str


class Layer(Part):
    """What quantizing one linear cost."""

    name: str
    scheme: str
    shape: list[int]
    error: float | None = Field(
        default=None,
        description="What quantizing it lost, relative, by `error_of`; absent if no calibration token reached it.",
    )
    error_of: Literal["outputs", "weights"] = Field(
        default="outputs",
        description="What the error is of: the linear's outputs on calibration inputs, |X(W - Q)| / |XW|, or, where no text"
        " was read, its weights by themselves, |W - Q| / |W|.",
    )


class TrainingPoint(Part):
    """A moment of a training."""

    step: int
    tokens: int = Field(description="Read so far.")
    loss: float | None = Field(default=None, description="What was minimised, in that step.")
    held_out: dict[str, float] | None = Field(
        default=None,
        description="On text that is not trained on, in nats: the distance from the `teacher`, the `text`'s own next tokens.",
    )
    seconds: float | None = Field(default=None, description="Since the start; in reports of earlier versions only.")


class WrittenAt(Part):
    """What a model wrote while it was trained."""

    step: int
    texts: list[Sample]


class TrainingRecord(Part):
    """A training that a model went through."""

    step: int = Field(description="Of the recipe, from 0.")
    tokens: int
    seconds: float | None = Field(default=None, description="In reports of earlier versions only.")
    skipped: int = Field(description="Steps that were passed over as spikes.")
    curve: list[TrainingPoint]
    samples: list[WrittenAt] = []


class Change(Part):
    """A quantity of a model over that of the baseline."""

    ratio: float
    interval: Interval | None = Field(
        default=None,
        description="95%. Accuracy: paired where both read the same. Speed: of the median of the rounds' ratios, by their ranks; absent for fewer than six rounds.",
    )
    significant: bool | None = Field(default=None, description="Whether the interval excludes 1; absent without one.")


class TaskChange(Part):
    """A task's metric beside the baseline's."""

    task: str
    metric: str
    filter: str
    difference: float
    interval: Interval | None = None
    significant: bool | None = None
    gained: int | None = Field(
        default=None, description="Items that were wrong and are right; for right-or-wrong metrics."
    )
    lost: int | None = Field(default=None, description="Items that were right and are wrong.")
    p_value: float | None = Field(default=None, description="McNemar's exact test of gained against lost.")


class Against(Part):
    """A model beside the baseline."""

    perplexity: Change | None = None
    bits_per_byte: Change | None = None
    kl: float | None = Field(default=None, description="Mean divergence of the next token's distribution, in nats.")
    kl_interval: Interval | None = None
    top1_agreement: float | None = Field(default=None, description="Positions where both have the same first choice.")
    top1_interval: Interval | None = None
    tasks: list[TaskChange] = []
    size: Change | None = Field(default=None, description="Checkpoint bytes.")
    memory: Change | None = Field(default=None, description="Peak memory.")
    prefill: Change | None = None
    decode: Change | None = None
    loads: dict[str, Change] = Field(default={}, description="Generated tokens a second, by concurrency.")
    predicted_decode: float | None = Field(default=None, description="The speedup that reading fewer bytes predicts.")
    reasons: list[str] = Field(default=[], description="Why speed differs from the prediction.")


class Loader(Part):
    """Whether another program loads a checkpoint."""

    name: str
    loads: bool
    why: str = Field(default="", description="Why not; or how, and what it computes in another way.")
    advice: str = Field(default="", description="What to change so that it does.")

    @property
    def sentence(self) -> str:
        """All of it for people."""
        if self.loads:
            return f"{self.name}: yes{', ' + self.why if self.why else ''}"
        return f"{self.name}: no, {self.why}{f' ({self.advice})' if self.advice else ''}"


class ModelResult(Part):
    """Everything about one checkpoint."""

    name: str
    role: Literal["baseline", "candidate"]
    path: str | None = None
    fingerprint: str = Field(description="SHA-256 over the names, types, shapes and bytes of all tensors.")
    scheme: str
    size: Size
    text: Text | None = None
    tasks: list[TaskResult] = []
    speed: Speed | None = None
    samples: list[Sample] = []
    layers: list[Layer] = Field(default=[], description="Worst first.")
    training: list[TrainingRecord] = []
    recipe: dict[str, Any] | None = None
    reload: dict[str, Any] | None = Field(default=None, description="How transformers reloads what was written.")
    against: Against | None = None
    loaders: list[Loader] = Field(
        default=[], description="Which other programs load it; empty where that is not known."
    )
    warnings: list[str] = []
