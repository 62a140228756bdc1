"""A whole report, as ``report.json`` holds it. Version 1 of the schema: fields may be added, but none changed or removed."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from .result import Machine, ModelResult, Part
from .terminal import alone, beside, drafts

SCHEMA = "smelt.report/1"


class ReportData(Part):
    """A whole report."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    title: str
    status: Literal["complete", "partial"]
    missing: list[str] = Field(default=[], description="Measurements missing from a partial report.")
    verdict: str
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, Any] = Field(description="The evaluation settings.")
    models: list[ModelResult] = Field(description="The baseline first, if there is one.")
    warnings: list[str] = Field(default=[])

    @property
    def baseline(self) -> ModelResult | None:
        """The model that the others are compared with."""
        return next((model for model in self.models if model.role == "baseline"), None)

    @property
    def candidates(self) -> list[ModelResult]:
        """All others."""
        return [model for model in self.models if model.role == "candidate"]

    def summary(self, *, colour: bool = False) -> str:
        """The verdict, then each model's measurements; a slowdown in red with its reason."""
        lines = [self.verdict]
        if self.status == "partial":
            lines.append(f"partial; not measured: {', '.join(self.missing)}")
        baseline = self.baseline
        if baseline is not None and len(self.models) > 2:
            lines += ["", f"{baseline.name} (baseline)", *(f"  {line}" for line in alone(baseline))]
        for model in self.candidates:
            if len(self.models) > 2:
                lines += ["", model.name]
            indent = "  " if len(self.models) > 2 else ""
            body = alone(model) if model.against is None or baseline is None else beside(baseline, model, colour)
            if model.against is not None:
                body += [each.sentence() for each in model.against.guarantees]
            lines += [indent + line for line in body]
        lines += [line for model in self.models for line in drafts(model)]
        lines += [f"note: {sentence}" for sentence in (*self.warnings, *(w for m in self.models for w in m.warnings))]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON, without missing measurements."""
        # JSON has no NaN or infinity; pydantic's own writer leaves such numbers empty.
        return json.loads(self.model_dump_json(by_alias=True, exclude_none=True))


def report_schema() -> dict[str, Any]:
    """The JSON schema of ``report.json``."""
    schema = ReportData.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "Smelt report"}
