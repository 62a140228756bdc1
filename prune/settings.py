"""The recipe's section about pruning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..quant.pattern import Pattern
from ..quant.settings.guard import Guard
from ..quant.settings.targets import compiled_patterns
from ..system.settings import PathText, RecipeModel


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

    _patterns = field_validator("targets", "ignore")(compiled_patterns)
