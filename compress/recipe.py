"""The recipe: what a run does, as a strict schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from ..quant import scheme_names as schemes
from ..quant.pattern import Pattern
from ..quant.rounding import METHODS
from ..quant.transforms import TRANSFORMS
from ..runtime.machine import human_bytes
from .recipe_model import Chosen, PathText, RecipeModel, Seed, choice_schema, one_of
from .recipe_training import Distill, TrainQuantized
from .text_source import TextSource

AUTO = "auto"
_LENGTH = "Tokens a window; absent for 256, or as many as the model has positions if they are fewer."


def _compiled(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns


class Calibrate(RecipeModel):
    """Where the text comes from that the model reads while it is compressed."""

    source: PathText = Field(
        default="builtin",
        description="`builtin`, `self` (the model writes its own text), a .txt or .jsonl file, or a Hugging Face dataset.",
    )
    samples: int = Field(default=64, ge=1, description="How many windows of text.")
    length: int = Field(default=256, ge=2, description=_LENGTH)
    field: str = Field(default="text", description="The field that holds the text in JSONL and datasets.")
    split: str = Field(default="train", description="The split of a Hugging Face dataset.")
    config: str | None = Field(default=None, description="The configuration of a Hugging Face dataset.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="What calibrates and rounds: `cpu`, or `cuda` for a GPU, of which each of several processes takes its own.",
    )


def _fitting(section: Calibrate | Evaluate, positions: int | None) -> dict[str, int]:
    if positions is None or positions < 2 or "length" in section.model_fields_set:
        return {}
    return {"length": min(section.length, positions)}


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


class Evaluate(RecipeModel):
    """What the compressed model is compared on with the original."""

    text: PathText = Field(
        default="builtin", description="`builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
    windows: int = Field(default=64, ge=1, description="Most windows of text to read.")
    length: int = Field(default=256, ge=2, description=_LENGTH)
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
        default=False, description="The load to measure speed with, `{}` for the usual one; false for none."
    )
    device: str = Field(
        default="cpu",
        description="What reads, answers and is measured: `cpu`, or `cuda` for a GPU. Streamed originals are read on the CPU.",
    )

    def within(self, positions: int | None) -> Evaluate:
        """The same for a model of so many positions: a length that was not chosen is none that does not fit."""
        return self.model_copy(update=_fitting(self, positions))

    def source(self) -> TextSource:
        """The text."""
        return TextSource(self.text, "evaluation", self.field, self.split, self.config)


class Rounding(Chosen):
    """A rounding method and its options."""

    kind = "rounding method"
    table = METHODS


class TransformChoice(Chosen):
    """A transform and its options."""

    kind = "transform"
    table = TRANSFORMS


def _scheme_name(value: Any) -> Any:
    if isinstance(value, str):
        reason = schemes.why_unsupported(value)
        if reason:
            raise ValueError(f"scheme {value} cannot be used: {reason}")
        return one_of(value.upper(), list(schemes.SUPPORTED), "scheme")
    return value


def _scheme_or_auto(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.lower() == AUTO else _scheme_name(value)


RoundingField = Annotated[Rounding, WithJsonSchema(choice_schema(METHODS))]
TransformField = Annotated[TransformChoice, WithJsonSchema(choice_schema(TRANSFORMS))]
SchemeField = Annotated[str, BeforeValidator(_scheme_name)]
SchemeOrAutoField = Annotated[str, BeforeValidator(_scheme_or_auto)]


class KvCache(RecipeModel):
    """What keys and values are cached in."""

    numbers: Literal["fp8", "int8", "int4"]
    scales: Literal["tensor", "head", "token"] | None = Field(
        default=None,
        description="One scale for a layer or for each head, from the calibration text, or one for each token and head as"
        " it comes. By default `tensor`, which servers read; `token` for int4, which needs it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"numbers": value} if isinstance(value, str) else value


KvCacheField = Annotated[
    KvCache,
    WithJsonSchema({"anyOf": [{"enum": ["fp8", "int8", "int4"]}, KvCache.model_json_schema()]}),
]


class Guard(RecipeModel):
    """What happens to a layer whose outputs change too much."""

    max_layer_error: float = Field(
        gt=0, description="The largest relative error of a layer's outputs on calibration inputs that passes."
    )
    otherwise: Literal["warn", "fail", "fallback"] = Field(
        default="warn", description="Tell it in the report, end the run, or store the layer with `fallback`'s scheme."
    )
    fallback: SchemeField = Field(
        default="W8A16",
        description="The scheme of layers that fail, with all that read the same input.",
        json_schema_extra={"enum": list(schemes.SUPPORTED)},
    )


class Override(RecipeModel):
    """What some linears are given instead of the step's own choices."""

    targets: list[str] = Field(
        min_length=1, description="Which linears: module names, or `re:` and a regular expression."
    )
    scheme: SchemeField | None = Field(
        default=None,
        description="Their number format; absent for the step's.",
        json_schema_extra={"enum": [*schemes.SUPPORTED, None]},
    )
    group_size: int | None = Field(default=None, description="Columns that share a scale; absent for the scheme's own.")
    inputs: Literal["dynamic", "static", "static_asymmetric"] | None = Field(
        default=None, description="Where 8-bit inputs get their scales from; absent for the scheme's own."
    )
    rounding: RoundingField | None = Field(
        default=None, description="How their codes are picked; absent for the step's."
    )

    @model_validator(mode="after")
    def _group_size_fits_scheme(self) -> Override:
        if self.scheme is not None:
            schemes.check(self.scheme, self.group_size, self.inputs)
        elif self.group_size is not None or self.inputs is not None:
            raise ValueError("group_size and inputs belong to a scheme; name it, too")
        return self

    _patterns = field_validator("targets")(_compiled)


class Candidate(RecipeModel):
    """A number format that `scheme: auto` may choose."""

    scheme: SchemeField = Field(
        description="By compressed-tensors' name.", json_schema_extra={"enum": list(schemes.SUPPORTED)}
    )
    group_size: int | None = Field(
        default=None, description="Columns that share a scale; absent for the step's, or the scheme's own."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"scheme": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _group_size_fits_scheme(self) -> Candidate:
        schemes.check(self.scheme, self.group_size)
        return self


CandidateField = Annotated[
    Candidate, WithJsonSchema({"anyOf": [{"enum": list(schemes.SUPPORTED)}, Candidate.model_json_schema()]})
]
USUAL_CANDIDATES = ("W2A16", "W3A16", "W4A16", "W8A16")


class Target(RecipeModel):
    """What `scheme: auto` must keep to: one of these."""

    bits: float | None = Field(
        default=None, gt=0, description="Most bits a weight of the linears that are chosen for, scales included."
    )
    bytes: int | None = Field(default=None, gt=0, description="Most bytes of the checkpoint's weights files.")
    speedup: float | None = Field(
        default=None, gt=1, description="Least gain in decoding speed of one request, by the runtime on this machine."
    )

    @model_validator(mode="after")
    def _one(self) -> Target:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("a target is one of bits, bytes and speedup")
        return self

    @property
    def kind(self) -> str:
        """Which of them."""
        return next(iter(self.model_dump(exclude_none=True)))

    @property
    def label(self) -> str:
        """For people: ``4.25 bits``, ``3.5 MB``, ``2x faster``."""
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return human_bytes(self.bytes) if self.bytes is not None else f"{self.speedup:g}x faster"


class Quantize(RecipeModel):
    """Store weights (and compute with activations) in fewer bits."""

    scheme: SchemeOrAutoField = Field(
        description="The number format, by compressed-tensors' name; `auto` chooses one of `candidates` for every part"
        " of the model, so that it loses least within `target`.",
        json_schema_extra={"enum": [AUTO, *schemes.SUPPORTED]},
    )
    group_size: int | None = Field(
        default=None,
        description="Columns that share a scale; -1 for one scale per output channel; absent for the scheme's own.",
    )
    candidates: list[CandidateField] | None = Field(
        default=None,
        min_length=1,
        description=f"What `auto` chooses from, besides leaving a part as it is; absent for {', '.join(USUAL_CANDIDATES)}.",
    )
    target: Target | None = Field(default=None, description="What `auto` must keep to.")
    loss: Literal["fisher", "kl"] | None = Field(
        default=None,
        description="How `auto` judges what rounding a part costs: by gradients, or by measuring it (exact, and slow);"
        " absent for `fisher`.",
    )
    inputs: Literal["dynamic", "static", "static_asymmetric"] | None = Field(
        default=None,
        description="Where 8-bit inputs get their scales from: each token, or the calibration text; absent for the scheme's own.",
    )
    kv_cache: KvCacheField | None = Field(
        default=None,
        description="What keys and values are cached in: `fp8`, `int8` or `int4`, or {numbers: …, scales: …}; absent for"
        " as they are computed.",
    )
    embeddings: Literal["int8"] | None = Field(
        default=None,
        description="What the input embedding is stored in: `int8`, with a scale for each token; absent for as it is.",
    )
    transforms: list[TransformField] = Field(
        default=[],
        description="What is done to the weights before they are rounded, in order, without changing the function.",
    )
    rounding: RoundingField = Field(
        default_factory=lambda: Rounding(method="nearest"),
        description="How codes are picked: a name, or {method: …, option: …}.",
    )
    targets: list[str] = Field(
        min_length=1,
        default=["Linear"],
        description="What to quantize: `Linear`, module names, or `re:` and a regular expression.",
    )
    ignore: list[str] = Field(
        default=["lm_head"],
        description="What to leave as it is, named like targets; `lm_head` is the output head by any name.",
    )
    guard: Guard | None = Field(default=None, description="A limit on what a layer may lose; absent for none.")
    diagnostics: int | None = Field(
        default=None,
        ge=1,
        description="Calibration windows on which the errors of layers' outputs are measured where nothing else reads text;"
        " absent for the errors of their weights.",
    )
    train: TrainQuantized | None = Field(
        default=None,
        description="Train the rounded model on, rounding at every step (quantization-aware training); absent for not at all.",
    )
    overrides: list[Override] = Field(
        default=[], description="Linears with another scheme or rounding; where several name one, the last decides."
    )

    @model_validator(mode="after")
    def _fields_fit_scheme(self) -> Quantize:
        if self.scheme != AUTO:
            schemes.check(self.scheme, self.group_size, self.inputs)
            given = [name for name in ("candidates", "target", "loss") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} belongs to scheme: auto; remove it or set scheme: auto")
            return self
        if self.target is None:
            raise ValueError("scheme: auto needs a target, such as target: {bits: 4.25}")
        if self.inputs is not None:
            raise ValueError("inputs belongs to one scheme; remove it, or name a scheme instead of auto")
        if self.guard is not None and self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback would break auto's target; use warn or fail")
        for candidate in self.auto_candidates():
            schemes.check(candidate.scheme, candidate.group_size)
        return self

    def auto_candidates(self) -> list[Candidate]:
        """What `auto` chooses from, each with its group size settled; none twice."""
        found: dict[object, Candidate] = {}
        for candidate in self.candidates or [Candidate(scheme=name) for name in USUAL_CANDIDATES]:
            if candidate.group_size is None and schemes.SCHEMES[candidate.scheme].group is not None:
                candidate = Candidate(scheme=candidate.scheme, group_size=self.group_size)
            found.setdefault(schemes.settled(candidate.scheme, candidate.group_size), candidate)
        return list(found.values())

    _patterns = field_validator("targets", "ignore")(_compiled)


class _Structure(NamedTuple):
    """What a prune step may say of one kind of structure: the first score is the usual one."""

    scores: tuple[str, ...]
    updates: tuple[str, ...]
    amounts: tuple[str, ...]


_SINGLE_WEIGHTS = ("wanda", "magnitude", "obs"), ("sparsegpt",)
_UNIT_SCORES = ("activation", "wanda", "taylor", "weight", "path")
_STRUCTURES = {
    "blocks": _Structure(("influence", "loss"), ("merge",), ("count", "ratio", "keep")),
    "attention": _Structure(("influence", "loss"), (), ("count", "ratio")),
    "mlp": _Structure(("influence", "loss"), (), ("count", "ratio")),
    "ffn": _Structure(_UNIT_SCORES, ("least_squares",), ("ratio", "size")),
    "heads": _Structure(_UNIT_SCORES, ("least_squares",), ("count", "ratio", "size")),
    "hidden": _Structure(("pca", "activation", "taylor", "weight"), (), ("ratio", "size")),
    "experts": _Structure(("activation", "frequency", "taylor", "path"), (), ("count", "ratio")),
    "vocabulary": _Structure((), (), ()),
    "auto": _Structure((), (), ()),
    "weights": _Structure(*_SINGLE_WEIGHTS, ("sparsity",)),
}
_SHARED_OUT = ("uniform", "sensitivity")
_WHOLE_PARTS = ("blocks", "attention", "mlp", "ffn", "heads", "hidden", "experts", "vocabulary", "auto")
_PATTERN = _Structure(*_SINGLE_WEIGHTS, ())


def _structure(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
        value = f"{value // 60}:{value % 60}"  # YAML reads 2:4 without quotes as minutes and seconds
    if value in _STRUCTURES or not isinstance(value, str):
        return value
    try:
        Pattern.named(value)
    except ValueError:
        raise ValueError(f"{value!r} is none of {', '.join(_STRUCTURES)} and no pattern such as 2:4") from None
    return value


class Place(RecipeModel):
    """Where latency is measured."""

    batch: int = Field(default=1, ge=1, le=64, description="Sequences that decode together.")
    context: int = Field(default=256, ge=2, description="Tokens that each of them has, the new one included.")


class PruneTarget(RecipeModel):
    """What `structure: auto` must keep to: one of params and latency."""

    params: float | None = Field(
        default=None, gt=0, lt=1, description="The largest share of the parameters that is left."
    )
    latency: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="The largest share of the time that a decoding step takes, measured on this machine's runtime.",
    )
    at: Place | None = Field(default=None, description="For how many sequences, and how long; 1 and 256 unless told.")

    @model_validator(mode="after")
    def _one(self) -> PruneTarget:
        if (self.params is None) == (self.latency is None):
            raise ValueError("a target is one of params and latency")
        return self

    @property
    def place(self) -> Place:
        """Where latency is measured."""
        return self.at or Place()

    @property
    def label(self) -> str:
        """For people: ``0.7 of the parameters``."""
        if self.params is not None:
            return f"{self.params:g} of the parameters"
        return f"{self.latency:g} of the latency"


class Prune(RecipeModel):
    """Take parts of the model away."""

    structure: Annotated[str, BeforeValidator(_structure)] = Field(
        description="What is taken away: whole `blocks`, the `attention` or the feed-forward part (`mlp`) of some, channels of feed-forward layers (`ffn`) , attention `heads`, channels"
        " of the residual stream (`hidden`), `experts` of mixtures, tokens of the `vocabulary`, or what a search under a `target` finds best (`auto`), which leaves a smaller model; single `weights`, wherever they are; or `2:4` and the like, so many of each group of neighbours. Of the last"
        " two, only zeros are left.",
        json_schema_extra={"anyOf": [{"enum": [*_STRUCTURES, "2:4", "4:8"]}, {"pattern": "^[0-9]+:[0-9]+$"}]},
    )
    score: (
        Literal[
            "influence",
            "loss",
            "activation",
            "wanda",
            "taylor",
            "weight",
            "path",
            "frequency",
            "pca",
            "magnitude",
            "obs",
        ]
        | None
    ) = Field(
        default=None,
        description="What goes first. Blocks and their parts: those that turn their inputs least (`influence`, ShortGPT's; one pass), or, one"
        " after another, the one without which the calibration text is predicted best (`loss`). Channels and heads: the least by their norm on the calibration text (`activation`), by that"
        " times the norm of the columns that read them (`wanda`), by what the loss would gain or lose without them to first"
        " order (`taylor`), and without reading any text by the norm of those columns (`weight`) or by the product of the norms of"
        " all that writes and reads them (`path`). Experts: the least by the norms of what they add on the text (`activation`),"
        " by how many tokens reach them (`frequency`), by `taylor` or by `path`."
        " The residual stream: by variance, after it is turned to its principal directions (`pca`, SliceGPT's way), or its own"
        " channels by `activation`, `taylor` or `weight`. Weights: the least by size"
        " times input (`wanda`), by size (`magnitude`), or those that later columns make up for best (`obs`, SparseGPT's own,"
        " which needs its update). Absent for the first of these, and `obs` with `update: sparsegpt`.",
    )
    count: int | None = Field(
        default=None,
        ge=1,
        description="How many blocks, parts of blocks, query heads or experts of each layer; or give ratio.",
    )
    ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Which share of the blocks, parts of blocks, heads, experts or channels; of all but channels, or give count.",
    )
    size: int | None = Field(
        default=None, ge=1, description="How many channels, or query heads, are left; or give ratio or count."
    )
    keep: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Which blocks stay, by number, such as [0, 2, 5]; nothing is measured then. Or give count or ratio.",
    )
    sparsity: float | None = Field(default=None, gt=0, lt=1, description="Which share of the weights of each linear.")
    guard: Guard | None = Field(
        default=None,
        description="A limit on how much a layer's outputs may change on the calibration text (`weights`, patterns, `ffn`,"
        " `heads`), and whether that is told or ends the run.",
    )
    multiple: int | None = Field(
        default=None,
        ge=1,
        description="What is left of a width (`ffn`, `hidden`, `auto`) is a multiple of it; absent for what kernels and groups"
        " of scales like.",
    )
    target: PruneTarget | None = Field(
        default=None, description="Of `auto`: what the shape must keep to. Among those that do, it loses least."
    )
    allocation: Literal["uniform", "owl", "sensitivity"] = Field(
        default="uniform",
        description="How the sparsity of single weights, or a number of channels (`ffn`) or `heads`, is shared out. `uniform`: the same"
        " for every linear; `owl` (weights only): less for blocks with more outliers (OWL); `sensitivity`: to each linear or block what costs"
        " the predictions least, by their Fisher information. Blocks of different sizes are no plain Hugging Face model:"
        " Smelt loads it, and transformers with smelt.compress.config_for.",
    )
    corpus: PathText | None = Field(
        default=None,
        description="Of the vocabulary: the tokens of this text stay. `builtin`, a .txt or .jsonl file, or a Hugging Face"
        " dataset.",
    )
    update: Literal["merge", "least_squares", "sparsegpt"] | None = Field(
        default=None,
        description="How what is left makes up for it. Blocks: `merge` adds to a block what those removed behind it are apart"
        " from it (LaCo). Channels and heads: `least_squares` fits the columns that read the rest. Weights: `sparsegpt` lets the columns to come take over. Absent for not at all.",
    )
    targets: list[str] = Field(
        min_length=1,
        default=["Linear"],
        description="Which linears weights are taken from: `Linear`, module names, or `re:` and a regular expression. The"
        " output head is never one of them.",
    )
    ignore: list[str] = Field(default=[], description="Which of these are left as they are, named like targets.")

    @model_validator(mode="after")
    def _fits_structure(self) -> Prune:
        known = _STRUCTURES.get(self.structure, _PATTERN)
        amounts = [name for name in ("count", "ratio", "size", "keep", "sparsity") if getattr(self, name) is not None]
        if (self.corpus is None) == (self.structure == "vocabulary"):
            raise ValueError(
                "structure vocabulary needs a corpus, whose tokens are to stay"
                if self.corpus is None
                else f"corpus is not for {self.structure}; remove it"
            )
        if (self.target is None) == (self.structure == "auto"):
            raise ValueError(
                "structure auto needs a target, such as target: {params: 0.7}"
                if self.target is None
                else f"target is for structure auto; {self.structure} is told how much goes, so remove one of them"
            )
        if len(amounts) != min(1, len(known.amounts)) or not set(amounts) <= set(known.amounts):
            if self.structure == "auto":
                raise ValueError(f"structure auto finds out itself how much goes; remove {amounts[0]}")
            if self.structure == "vocabulary":
                raise ValueError(f"structure vocabulary keeps what its corpus uses; remove {amounts[0]}")
            if not known.amounts:
                raise ValueError(f"structure {self.structure} says itself how many weights go; remove {amounts[0]}")
            *others, last = known.amounts
            one = f"{', '.join(others)} or {last}" if others else last
            more = {0: "", 1: " and not both"}.get(len(others), ", and only one of them")
            raise ValueError(f"structure {self.structure} needs {one}{more}")
        if self.keep is not None and (self.score is not None or self.keep != sorted(set(self.keep))):
            raise ValueError(
                "keep says itself which blocks stay; remove score"
                if self.score is not None
                else f"keep: {self.keep} must name each block once, in order"
            )
        if self.multiple is not None and self.size is not None:
            raise ValueError("size says exactly what is left; remove multiple")
        if self.multiple is not None and self.structure not in ("ffn", "hidden", "auto"):
            raise ValueError(f"multiple is for widths; {self.structure} has none, so remove it")
        shares = {"weights": ("uniform", "owl", "sensitivity"), "ffn": _SHARED_OUT, "heads": _SHARED_OUT}
        if self.allocation not in shares.get(self.structure, ("uniform",)):
            if self.structure in shares:
                raise ValueError(
                    f"allocation {self.allocation} is for single weights; expected {', '.join(_SHARED_OUT)}"
                )
            raise ValueError(
                f"allocation shares weights, channels and heads out over layers; {self.structure} takes the same from each,"
                " so remove it"
            )
        if self.score is not None and self.score not in known.scores:
            expected = f"expected {', '.join(known.scores)}" if known.scores else "remove it"
            raise ValueError(f"score {self.score} is not for {self.structure}; {expected}")
        if self.update is not None and not known.updates:
            raise ValueError(f"update {self.update} is not for {self.structure}, which knows none; remove it")
        if self.update is not None and self.update not in known.updates:
            raise ValueError(f"update {self.update} is not for {self.structure}; expected {', '.join(known.updates)}")
        if self.score == "obs" and self.update is None:
            raise ValueError("score obs is what an error costs once others make up for it; add update: sparsegpt")
        if self.structure in _WHOLE_PARTS and (self.targets != ["Linear"] or self.ignore):
            raise ValueError(
                f"targets and ignore choose linears for single weights; {self.structure} go from all alike"
            )
        return self

    @model_validator(mode="after")
    def _guards_what_it_can(self) -> Prune:
        if self.guard is None:
            return self
        if self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback stores a layer in another format; use warn or fail")
        if self.structure in _WHOLE_PARTS and self.structure not in ("ffn", "heads"):
            raise ValueError(
                f"guard limits what a layer's outputs change by; {self.structure} go as a whole, so remove it"
            )
        return self

    _patterns = field_validator("targets", "ignore")(_compiled)


class StepEntry(RecipeModel):
    """One step of a recipe: exactly one of the step names as its key."""

    quantize: Quantize | None = None
    prune: Prune | None = None
    distill: Distill | None = None

    @model_validator(mode="after")
    def _one_step(self) -> StepEntry:
        if sum(each is not None for each in (self.quantize, self.prune, self.distill)) != 1:
            raise ValueError("a step has one name: quantize, prune or distill")
        return self

    @model_serializer(mode="wrap")
    def _named_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: settings for name, settings in handler(self).items() if settings is not None}


class Recipe(RecipeModel):
    """A run: a model, what is done to it, and where the result goes.

    Load one with :meth:`load`; all mistakes of the file are reported at once, each with its line.
    """

    model: PathText = Field(description="A directory, a Hugging Face hub name, or builtin:smelt-6m.")
    adapter: PathText | None = Field(
        default=None,
        description="The directory of a LoRA adapter that peft saved, to be merged into the model before anything is done"
        " to it; the model may then be a compressed checkpoint.",
    )
    output: PathText = Field(description="The directory that gets checkpoint/, report.* and journal/.")
    seed: Seed = Field(default=0, description="Chooses calibration windows and self-written text.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Off unless asked for."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    calibrate: Calibrate = Field(default_factory=Calibrate)
    steps: list[StepEntry] = Field(min_length=1, description="What is done, in order.")
    evaluate: Evaluate | Literal[False] = Field(
        default_factory=Evaluate, description="What to measure afterwards; false for nothing."
    )

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Recipe:
        """Read a YAML recipe.

        Args:
            path: the file. ``extends: other.yaml`` in it is resolved relative to the file.
            overrides: ``key=value`` settings such as ``steps.0.quantize.scheme=W8A16``.

        Raises:
            SmeltError: with one line a mistake.
        """
        from .recipe_file import load

        return load(Path(path), overrides or [])

    @model_validator(mode="after")
    def _diagnostics_are_there(self) -> Recipe:
        for number, entry in enumerate(self.steps):
            wanted = entry.quantize and entry.quantize.diagnostics
            if wanted and wanted > self.calibrate.samples:
                raise ValueError(
                    f"steps.{number}.quantize.diagnostics asks for {wanted} windows, and calibrate.samples is"
                    f" {self.calibrate.samples}; raise that"
                )
        return self

    def within(self, positions: int | None) -> Recipe:
        """The same recipe for a model of so many positions: lengths that were not chosen are none that do not fit."""
        calibrate = self.calibrate.model_copy(update=_fitting(self.calibrate, positions))
        evaluate = self.evaluate and self.evaluate.within(positions)
        return self.model_copy(update={"calibrate": calibrate, "evaluate": evaluate})

    def content(self) -> dict[str, Any]:
        """The recipe as plain data, without the output directory: what decides the result's bytes."""
        return self.model_dump(mode="json", exclude={"output"})
