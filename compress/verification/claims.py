"""What ``smelt.json`` claims of a checkpoint: its files' hashes, logits of some tokens, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ...system.errors import SmeltError
from ...system.files import read_json, write_text
from ..results.report import ReportData
from ..results.result import Change, Guaranteed, Machine

RECORD = "smelt.json"
_KEY = "claims"


class FileClaim(BaseModel):
    """A file's digest, and those of its tensors, which tell where it was changed."""

    sha256: str
    bytes: int
    tensors: dict[str, str] = {}


class LogitsClaim(BaseModel):
    """How likely transformers found some tokens, when the checkpoint was reloaded.

    Attributes:
        tokens: windows of token ids.
        logprobs: the log probability of each token but a window's first, computed in ``dtype``.
        loaded: how: ``plain``, ``dequantized`` (``CompressedTensorsConfig(dequantize=True)``) or ``plug-in`` (``config_for``).
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    dtype: Literal["float32", "bfloat16", "float16"]
    loaded: Literal["plain", "dequantized", "plug-in"]


class TaskClaim(BaseModel):
    """A metric of a task."""

    task: str
    metric: str
    filter: str
    value: float
    items: int


class SpeedClaim(BaseModel):
    """Ratios of speed to the baseline's."""

    decode: Change | None = None
    prefill: Change | None = None
    loads: dict[str, Change] = {}


class MeasuredClaims(BaseModel):
    """What the report said of the checkpoint.

    Attributes:
        settings: of the evaluation.
        baseline: the original's name, as the recipe had it.
        baseline_fingerprint: says whether another directory holds the same weights.
        machine: on which speed was measured.
    """

    settings: dict[str, Any]
    baseline: str
    baseline_fingerprint: str
    machine: Machine
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    tasks: list[TaskClaim] = []
    guarantees: list[Guaranteed] = []
    speed: SpeedClaim | None = None

    @classmethod
    def of(cls, report: ReportData, baseline: str) -> MeasuredClaims | None:
        """The claims that a run's report makes of its checkpoint; None if nothing was measured.

        Args:
            report: of the checkpoint beside its original.
            baseline: the original's name, as the recipe has it.
        """
        (model,), original = report.candidates, report.baseline
        beside = model.against
        if original is None or beside is None or not (model.text or model.tasks or model.speed):
            return None
        ratio = beside.perplexity
        return cls(
            settings=report.settings,
            baseline=baseline,
            baseline_fingerprint=original.fingerprint,
            machine=report.machine.model_copy(
                update={"read_bytes_per_second": None, "operations_per_second": None, "measured_on": None}
            ),
            perplexity=model.text.perplexity if model.text else None,
            perplexity_ratio=ratio.ratio if ratio else None,
            kl=beside.kl,
            tasks=[
                TaskClaim(task=t.task, metric=t.metric, filter=t.filter, value=t.value, items=t.items)
                for t in model.tasks
            ],
            guarantees=[each for each in beside.guarantees if each.verdict == "certified"],
            speed=SpeedClaim(decode=beside.decode, prefill=beside.prefill, loads=beside.loads) if model.speed else None,
        )


class Claims(BaseModel):
    """All that a checkpoint claims of itself."""

    files: dict[str, FileClaim] = Field(default={}, description="By name; all but the record itself and README.md.")
    logits: LogitsClaim | None = None
    measured: MeasuredClaims | None = None

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
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise SmeltError(
                f"{file}: {_KEY}.{place}: {first['msg']}; the file was changed after it was written"
            ) from None

    def data(self) -> dict[str, Any]:
        """As the record holds them, under its key."""
        return {_KEY: json.loads(self.model_dump_json(exclude_none=True))}


def claim_measured(checkpoint: Path, report: ReportData, baseline: str) -> None:
    """Add to a checkpoint's record what its report says.

    Args:
        checkpoint: that a run has written, with the claims on its files.
        report: of the run.
        baseline: the original's name, as the recipe has it.
    """
    file = checkpoint / RECORD
    record = json.loads(file.read_text(encoding="utf-8"))
    claims = Claims.read(checkpoint).model_copy(update={"measured": MeasuredClaims.of(report, baseline)})
    write_text(file, json.dumps(record | claims.data(), indent=2) + "\n")
