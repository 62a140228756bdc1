"""The part of a report about each model.

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
    values: list[float] = Field(description="All repeats, in the order measured; models take turns.")

    @property
    def range(self) -> Interval:
        """The smallest and the largest."""
        return min(self.values), max(self.values)


class Machine(Part):
    """The machine that the numbers were measured on."""

    processor: str
    cores: int = Field(description="CPU cores that this process may use.")
    threads: int = Field(description="That computed.")
    memory_bytes: int
    system: str
    measured_on: str | None = Field(default=None, description="The date, in UTC, on which speed was measured.")
    device: str = Field(description="The device: `cpu`, or the name of a GPU.")
    read_bytes_per_second: float | None = Field(
        default=None,
        description="Memory read bandwidth, measured in this run; on a GPU that of a copy, read plus write.",
    )
    operations_per_second: float | None = Field(
        default=None, description="Matrix-product rate in `operations_dtype`, measured in this run."
    )
    operations_dtype: str | None = None


class Size(Part):
    """A checkpoint's size on disk."""

    bytes: int = Field(description="Bytes of all tensors.")
    parameters: int
    bits_per_weight: float = Field(description="Average over all parameters, scales included.")
    linear_bits_per_weight: float | None = Field(default=None, description="Average over quantized linears only.")


class Text(Part):
    """How well a model predicts a text."""

    source: str
    windows: int
    of: int | None = Field(
        default=None,
        description="How many windows there are, if fewer were read, in random order, because what is guaranteed was known.",
    )
    length: int = Field(description="Tokens per window; each window is read from position 0.")
    perplexity: float = Field(description="exp of the mean negative log-likelihood per token.")
    perplexity_interval: Interval | None = Field(default=None, description="95%, over windows.")
    bits_per_byte: float = Field(description="Comparable between tokenizers, unlike perplexity.")
    nll: list[float] = Field(description="Negative log-likelihood of each window, in nats, summed over its tokens.")
    bytes: list[int] = Field(description="UTF-8 bytes of the predicted tokens of each window.")
    text_sha256: str = Field(description="SHA-256 of the tokens; equal if two models read the same tokens.")
    source_sha256: str = Field(
        description="SHA-256 of the beginning of the text; equal if two models read the same text."
    )
    computed_by: str

    @property
    def count(self) -> str:
        """How many windows, for people."""
        return f"{self.windows}" if self.of is None else f"{self.windows} of {self.of}"


class TaskResult(Part):
    """One metric of one lm-eval task."""

    task: str
    metric: str
    filter: str
    value: float
    interval: Interval | None = Field(default=None, description="95%, over items.")
    higher_is_better: bool
    aggregation: str = Field(description="lm-eval's name of the aggregation over items.")
    items: int
    of: int | None = Field(
        default=None,
        description="How many items there are, if fewer were answered, in random order, because what is guaranteed was known.",
    )
    by_item: list[Any] = Field(description="The metric of each item, in the task's order or, with `of`, as answered.")
    fewshot: int
    version: str
    group: str | None = Field(default=None, description="The group it is part of, whose value represents it.")
    data: str | None = Field(default=None, description="A digest of the task's items; absent for groups.")
    definition: str | None = Field(
        default=None, description="A digest of its prompts, answers, examples and metrics; absent for groups."
    )

    def answers_the_same(self, other: TaskResult) -> bool:
        """Whether the same items were answered, to the same prompts, so that one can be compared with the other."""
        names = ("task", "metric", "filter", "items", "of", "fewshot", "version")
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return False
        digests = ((self.data, other.data), (self.definition, other.definition))
        return all(mine == theirs or mine is None or theirs is None for mine, theirs in digests)

    @property
    def count(self) -> str:
        """How many items, for people."""
        return f"{self.items:,}" if self.of is None else f"{self.items:,} of {self.of:,}"


class Load(Part):
    """Speed at a number of concurrent requests."""

    concurrency: int
    requests: int = Field(description="Requests per repeat.")
    output_rate: Spread = Field(description="Generated tokens per second, over all requests.")
    first_token_p50: Spread
    first_token_p99: Spread
    between_tokens_p50: Spread
    between_tokens_p99: Spread


class TimePart(Part):
    """The time of one part of a step."""

    name: str
    seconds: float


class Speed(Part):
    """How fast a checkpoint runs."""

    prompt: int
    generate: int
    ranks: int = Field(default=1, description="Processes that computed it together.")
    first_token: Spread = Field(description="Time to first token of a single request.")
    prefill_rate: Spread = Field(description="Prompt tokens per second, single request.")
    decode_rate: Spread = Field(description="Generated tokens per second after the first, single request.")
    loads: list[Load]
    load_seconds: float | None = Field(
        default=None,
        description="Time to read the weights and build an engine; libraries are already imported, and files may be in the page cache. On a GPU this includes compiling kernels, unless cached. Absent for a server.",
    )
    peak_memory_bytes: int | None = Field(
        default=None,
        description="Resident memory of a process that serves only this model; on a GPU, the memory used there.",
    )
    interleaved: bool = Field(description="Whether models took turns, so that drift of the machine affects all alike.")
    decode_bytes_per_token: int | None = Field(
        default=None, description="Bytes of weights read per token; absent for a server."
    )
    decode_limit: float | None = Field(default=None, description="Tokens per second if bound only by reading weights.")
    decode_of_limit: float | None = None
    prefill_limit: float | None = Field(
        default=None,
        description="Tokens per second at the machine's matrix-product rate in `operations_dtype`; integer products may exceed it.",
    )
    prefill_of_limit: float | None = None
    decode_time: list[TimePart] = Field(
        description="Time of each part of a decode step; empty for a GPU and for a server."
    )
    prefill_time: list[TimePart] = Field(
        description="Time of each part of a prefill; empty for a GPU and for a server."
    )
    kernels: dict[str, str] = Field(description="The kernel of each linear; empty for a server.")


class DraftedLoad(Part):
    """What speculative decoding gains with a number of concurrent requests."""

    concurrency: int
    alone: Spread = Field(description="Generated tokens per second without drafts, over all requests.")
    drafted: Spread = Field(description="The same with drafts, in turns.")
    speedup: Change
    accepted: float | None = Field(default=None, description="Share of draft tokens that were accepted.")
    accepted_by_position: list[float] = Field(
        default=[], description="Share of the first, second, … draft tokens that were accepted."
    )
    tokens_per_verification: float | None = Field(
        default=None, description="Tokens that a sequence got from a step that verified its draft; one without drafts."
    )
    requests: int
    same_answers: int = Field(description="Requests that gave the same tokens with and without drafts.")

    @property
    def gains(self) -> bool:
        """Whether drafts were faster, and not within noise, where that is known."""
        return self.speedup.ratio > 1 and self.speedup.significant is not False


class DraftedSpeed(Part):
    """What speculative decoding gains a model."""

    drafter: str
    prompt: int
    generate: int
    loads: list[DraftedLoad]

    @property
    def stops_paying(self) -> int | None:
        """The smallest number of concurrent requests from which on drafts gained nothing; None if they did with the most."""
        found = None
        for load in sorted(self.loads, key=lambda each: -each.concurrency):
            if load.gains:
                break
            found = load.concurrency
        return found

    @property
    def verdict(self) -> str:
        """For people."""
        at, paying = self.stops_paying, sorted(load.concurrency for load in self.loads if load.gains)
        if len(paying) == len(self.loads):
            return "a gain was measured with each of these loads"
        if not paying:
            return "no gain beyond noise was measured with any of these loads"
        if at is not None and all(load.gains for load in self.loads if load.concurrency < at):
            return f"no gain was measured from {at} requests at once on"
        return f"a gain was measured with {', '.join(map(str, paying))} at once, and with no other of these loads"


class Sample(Part):
    """A model's greedy continuation of a prompt."""

    prompt: str
    text: str


class Layer(Part):
    """Quantization error of one linear."""

    name: str
    scheme: str
    shape: list[int]
    error: float | None = Field(
        default=None,
        description="Relative quantization error of `error_of`; absent if no calibration token reached it.",
    )
    error_of: Literal["outputs", "weights"] = Field(
        default="outputs",
        description="What the error measures: the linear's outputs on calibration inputs, |X(W - Q)| / |XW|, or, if no text"
        " was read, its weights, |W - Q| / |W|.",
    )


class TrainingPoint(Part):
    """One point of a training curve."""

    step: int
    tokens: int = Field(description="Tokens read so far.")
    loss: float | None = Field(default=None, description="The training loss of that step.")
    held_out: dict[str, float] | None = Field(
        default=None,
        description="Losses on held-out text, in nats: divergence from the `teacher`, cross-entropy of the `text`.",
    )
    seconds: float | None = Field(
        default=None, description="Time since the start; in reports of earlier versions only."
    )


class WrittenAt(Part):
    """Text that a model generated during training."""

    step: int
    texts: list[Sample]


class TrainingRecord(Part):
    """A training that a model went through."""

    step: int = Field(description="Index of the recipe's step, from 0.")
    tokens: int
    seconds: float | None = Field(default=None, description="Training time; in reports of earlier versions only.")
    skipped: int = Field(description="Steps skipped as gradient spikes.")
    curve: list[TrainingPoint]
    samples: list[WrittenAt] = []


class Change(Part):
    """The ratio of a model's quantity to the baseline's."""

    ratio: float
    interval: Interval | None = Field(
        default=None,
        description="95%. Accuracy: paired if both read the same. Speed: of the median of the rounds' ratios, by ranks; absent for fewer than six rounds.",
    )
    significant: bool | None = Field(default=None, description="Whether the interval excludes 1; absent without one.")


class TaskChange(Part):
    """A task's metric compared with the baseline's."""

    task: str
    metric: str
    filter: str
    difference: float
    interval: Interval | None = None
    significant: bool | None = None
    gained: int | None = Field(
        default=None, description="Items that changed from wrong to right; for right-or-wrong metrics."
    )
    lost: int | None = Field(default=None, description="Items that changed from right to wrong.")
    p_value: float | None = Field(default=None, description="McNemar's exact test of gained against lost.")


def claimed_bound(what: str, limit: float) -> str:
    """A bound of a loss for people, exactly as it was claimed.

    Args:
        what: the task, ``ppl`` or ``kl``.
        limit: of the loss.
    """
    return (
        f"the KL divergence is at most {limit:.10g} nats"
        if what == "kl"
        else f"{what} loses at most {100 * limit:.10g}%"
    )


class Guaranteed(Part):
    """What is known of a claim that a model loses at most so much. Bounds hold together with all other claims of the report."""

    claim: str
    what: str = Field(description="The task, `ppl` or `kl`.")
    limit: float = Field(description="Of the loss; of `kl` in nats.")
    confidence: float
    claims: int = Field(description="How many share the probability of an error.")
    verdict: Literal["certified", "refuted", "undecided"]
    items: int
    of: int | None = Field(default=None, description="How many items there are, if fewer were needed.")
    loss: float = Field(description="Over these items.")
    at_most: float = Field(description="The loss is at most so much, with the confidence.")
    at_least: float = Field(description="The loss is at least so much, with the confidence.")
    smallest: float = Field(
        description="The smallest loss that this many items could have certified, had none been lost."
    )
    more_items: int | None = Field(
        default=None, description="How many more items like these would certify it; none if no number would."
    )

    def sentence(self) -> str:
        """For people."""
        say, moved = self.say, self.say_signed
        of = claimed_bound(self.what, self.limit)
        sure = f"{100 * self.confidence:g}%" + (f", with all {self.claims} claims" if self.claims > 1 else "")
        rest = "" if self.of is None else f" of {self.of:,}, the others were not needed"
        is_text = self.what in ("ppl", "kl")
        items = "windows" if is_text else "items"
        over = f"{moved(self.loss)} over {self.items:,} {items}{rest}"
        if self.verdict == "certified":
            # A bound of what has none of its own needs a largest value.
            counted = ", if none would lose more than 1 nat a token" if is_text else ""
            return f"certified: {of} ({over}; at most {say(self.at_most)} with {sure}{counted})"
        if self.verdict == "refuted":
            return f"refuted: that {of} ({over}; at least {say(self.at_least)} with {sure})"
        if self.more_items is not None:
            needs = f"needs about {self.more_items:,} more {items} like these"
        else:
            needs = f"more {items} like these would not certify it"
        if is_text and self.loss > self.at_most:
            needs = f"a window lost more than 1 nat a token, which the bounds do not count; {needs}"
        return (
            f"undecided: whether {of} ({over}, from {moved(self.at_least)} to {moved(self.at_most)} with {sure};"
            f" so many {items} certify no less than {say(self.smallest)}): {needs}"
        )

    def say(self, value: float) -> str:
        """A loss for people."""
        return f"{value:.4f} nats" if self.what == "kl" else f"{value:.2%}"

    def say_signed(self, value: float) -> str:
        """The same with its sign, where it may have one."""
        return self.say(value) if self.what == "kl" else f"{value:+.2%}"


class Against(Part):
    """A model compared with the baseline."""

    perplexity: Change | None = None
    bits_per_byte: Change | None = None
    kl: float | None = Field(default=None, description="Mean KL divergence of the next-token distribution, in nats.")
    kl_interval: Interval | None = None
    top1_agreement: float | None = Field(
        default=None, description="Share of positions where both have the same top-1 token."
    )
    top1_interval: Interval | None = None
    tasks: list[TaskChange] = []
    size: Change | None = Field(default=None, description="Checkpoint bytes.")
    memory: Change | None = Field(default=None, description="Peak memory.")
    prefill: Change | None = None
    decode: Change | None = None
    loads: dict[str, Change] = Field(default={}, description="Generated tokens per second, by concurrency.")
    predicted_decode: float | None = Field(default=None, description="The decode speedup predicted from bytes read.")
    reasons: list[str] = Field(default=[], description="Why speed differs from the prediction.")
    guarantees: list[Guaranteed] = []


class Loader(Part):
    """Whether another program loads a checkpoint."""

    name: str
    loads: bool
    why: str = Field(default="", description="Why not; or how, and what it computes differently.")
    advice: str = Field(default="", description="What to change so that it loads.")

    @property
    def sentence(self) -> str:
        """All of it as a sentence."""
        if self.loads:
            return f"{self.name}: yes{', ' + self.why if self.why else ''}"
        return f"{self.name}: no, {self.why}{f' ({self.advice})' if self.advice else ''}"


class ModelResult(Part):
    """Everything about one checkpoint, or about a model behind a server."""

    name: str
    role: Literal["baseline", "candidate"]
    path: str | None = Field(default=None, description="Where it is; of a server, its address.")
    fingerprint: str = Field(
        description="SHA-256 of the names, dtypes, shapes and bytes of all tensors; of a server, of what it says of itself."
    )
    scheme: str = Field(description="How most weights are stored; of a server, the program and its version.")
    size: Size | None = Field(default=None, description="Absent for a server, which does not say it.")
    text: Text | None = None
    tasks: list[TaskResult] = []
    speed: Speed | None = None
    drafts: DraftedSpeed | None = Field(default=None, description="With speculative decoding, if a drafter was given.")
    samples: list[Sample] = []
    layers: list[Layer] = Field(default=[], description="Worst first.")
    training: list[TrainingRecord] = []
    recipe: dict[str, Any] | None = None
    reload: dict[str, Any] | None = Field(
        default=None, description="Result of reloading the checkpoint with transformers."
    )
    against: Against | None = None
    loaders: list[Loader] = Field(default=[], description="Which other programs load it; empty if unknown.")
    warnings: list[str] = []
