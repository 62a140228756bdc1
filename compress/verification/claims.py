"""What ``smelt.json`` claims of a checkpoint: its files' hashes, logits of some tokens, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from ...system.errors import SmeltError
from ...system.settings.checked import checked
from ...system.storage.files import read_json, write_text
from ...system.storage.new_directory import RECORD
from ..results.report import ReportData
from ..results.result import Machine, claimed_bound

_KEY = "claims"
_LONGEST_NAME = 255

# A record comes from outside: no number of it is infinite, and none that is divided by is zero.
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FileClaim(BaseModel):
    """A file's digest, and those of its tensors, which tell where it was changed."""

    sha256: str
    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    tensors: dict[str, str] = {}


class LogitsClaim(BaseModel):
    """How likely transformers found some tokens, when the checkpoint was reloaded.

    Attributes:
        tokens: windows of token ids.
        logprobs: the log probability of each token but a window's first, computed in ``dtype``.
        loaded: how: ``plain``, ``dequantized`` (``CompressedTensorsConfig(dequantize=True)``) or ``plug-in`` (``config_for``).
    """

    tokens: Annotated[list[list[Annotated[int, Field(ge=0, lt=1 << 31)]]], Field(min_length=1)]
    logprobs: list[list[Finite]]
    dtype: Literal["float32", "bfloat16", "float16"]
    loaded: Literal["plain", "dequantized", "plug-in"]

    @model_validator(mode="after")
    def _fits(self) -> LogitsClaim:
        length = len(self.tokens[0])
        if length < 2 or any(len(window) != length for window in self.tokens):
            raise ValueError("windows must be of one length, of at least 2 tokens")
        if [len(row) for row in self.logprobs] != [length - 1] * len(self.tokens):
            raise ValueError("each token but a window's first must have a log probability")
        return self


class TextClaim(BaseModel):
    """How well a text is predicted.

    Attributes:
        windows: how many were read.
        text_sha256: of their tokens.
        ratio: of the perplexity to the original's.
        kl: divergence from the original.
    """

    windows: int
    text_sha256: str
    perplexity: Positive
    ratio: Positive | None = None
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class TaskClaim(BaseModel):
    """A metric of a task."""

    task: str
    metric: str
    filter: str
    value: Finite
    items: Annotated[int, Field(ge=1)]


class BoundClaim(BaseModel):
    """A certified bound of a loss.

    Attributes:
        claim: as it was written.
        what: the task, ``ppl`` or ``kl``.
    """

    claim: str
    what: str
    limit: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)]

    def sentence(self) -> str:
        """For people."""
        return f"certified that {claimed_bound(self.what, self.limit)} ({100 * self.confidence:g}%)"


class SpeedClaim(BaseModel):
    """Ratios of speed to the original's.

    Attributes:
        intervals: of each, by ``decode``, ``prefill`` or the load; older records have none.
    """

    decode: Positive | None = None
    prefill: Positive | None = None
    loads: dict[str, Positive] = {}
    intervals: dict[str, tuple[Positive, Positive]] = {}

    @model_validator(mode="after")
    def _around_their_ratios(self) -> SpeedClaim:
        ratios = {"decode": self.decode, "prefill": self.prefill, **self.loads}
        for name, (low, high) in self.intervals.items():
            ratio = ratios.get(name)
            if ratio is None or not low <= ratio <= high:
                raise ValueError(f"the interval of {name}, {low:g} to {high:g}, is not around its ratio")
        return self


class MeasuredClaims(BaseModel):
    """What the report said of the checkpoint.

    Attributes:
        settings: of the evaluation.
        baseline: the original's name, as the recipe had it.
        baseline_fingerprint: says whether another directory holds the same weights.
        merged: whether an adapter was merged into the original, which then is in no directory.
        machine: on which speed was measured.
    """

    settings: dict[str, Any]
    baseline: str
    baseline_fingerprint: str
    merged: bool = False
    machine: Machine
    text: TextClaim | None = None
    tasks: list[TaskClaim] = []
    bounds: list[BoundClaim] = []
    speed: SpeedClaim | None = None

    @classmethod
    def of(cls, report: ReportData, baseline: str, *, merged: bool) -> MeasuredClaims | None:
        """The claims that a run's report makes of its checkpoint; None if nothing was measured.

        Args:
            report: of the checkpoint beside its original.
            baseline: the original's name, as the recipe has it.
            merged: whether an adapter was merged into it.
        """
        (model,), original = report.candidates, report.baseline
        beside = model.against
        if original is None or beside is None or not (model.text or model.tasks or model.speed):
            return None
        text = None
        if model.text is not None:
            text = TextClaim(
                windows=model.text.windows,
                text_sha256=model.text.text_sha256,
                perplexity=model.text.perplexity,
                ratio=beside.perplexity.ratio if beside.perplexity else None,
                kl=None if beside.kl is None else max(0.0, beside.kl),
            )
        speed = None
        if model.speed is not None:
            changes = {"decode": beside.decode, "prefill": beside.prefill, **beside.loads}
            speed = SpeedClaim(
                intervals={name: each.interval for name, each in changes.items() if each and each.interval},
                decode=beside.decode.ratio if beside.decode else None,
                prefill=beside.prefill.ratio if beside.prefill else None,
                loads={name: change.ratio for name, change in beside.loads.items()},
            )
        return cls(
            settings=report.settings,
            baseline=baseline,
            baseline_fingerprint=original.fingerprint,
            merged=merged,
            machine=report.machine.model_copy(
                update={"read_bytes_per_second": None, "operations_per_second": None, "measured_on": None}
            ),
            text=text,
            tasks=[
                TaskClaim(task=t.task, metric=t.metric, filter=t.filter, value=t.value, items=t.items)
                for t in model.tasks
                if t.items
            ],
            bounds=[
                BoundClaim(claim=each.claim, what=each.what, limit=each.limit, confidence=each.confidence)
                for each in beside.guarantees
                if each.verdict == "certified"
            ],
            speed=speed,
        )


class Claims(BaseModel):
    """All that a checkpoint claims of itself."""

    files: dict[str, FileClaim] = Field(
        default={}, description="By name; all but the record itself, its signature and README.md."
    )
    logits: LogitsClaim | None = None
    measured: MeasuredClaims | None = None

    @model_validator(mode="after")
    def _names_are_files(self) -> Claims:
        for name in self.files:
            if Path(name).name != name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
                raise ValueError(f"{name[:80]!r} is no name of a file in the checkpoint")
        return self

    @classmethod
    def read(cls, checkpoint: Path) -> Claims:
        """Those in a checkpoint's record.

        Raises:
            SmeltError: it has no record, or one without claims or that cannot be understood.
        """
        file = checkpoint / RECORD
        if not file.exists():
            raise SmeltError(f"{checkpoint}: has no {RECORD}, so it claims nothing that could be verified")
        found = read_json(file, "a checkpoint's record").get(_KEY)
        if found is None:
            raise SmeltError(
                f"{file}: claims nothing; it was not written by `smelt run`, or by one before claims were recorded"
            )
        changed = "the file was changed after it was written"
        try:
            return checked(
                cls,
                found,
                lambda place, what: f"{file}: {'.'.join(filter(None, (_KEY, place)))}: {what}; {changed}",
                most=1,
            )
        except UnicodeEncodeError as error:
            raise SmeltError(f"{file}: {error}; {changed}") from None

    def data(self) -> dict[str, Any]:
        """As the record holds them, under its key."""
        return {_KEY: json.loads(self.model_dump_json(exclude_none=True))}


def claim_measured(checkpoint: Path, report: ReportData, baseline: str, *, merged: bool = False) -> None:
    """Add to a checkpoint's record what its report says.

    Args:
        checkpoint: that a run has written, with the claims on its files.
        report: of the run.
        baseline: the original's name, as the recipe has it.
        merged: whether an adapter was merged into the original.
    """
    file = checkpoint / RECORD
    record = json.loads(file.read_text(encoding="utf-8"))
    measured = MeasuredClaims.of(report, baseline, merged=merged)
    claims = Claims.read(checkpoint).model_copy(update={"measured": measured})
    write_text(file, json.dumps(record | claims.data(), indent=2) + "\n")
