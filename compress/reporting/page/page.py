"""A report as one self-contained HTML file: needs no network, no server, and no JavaScript to be read."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...results import wording
from ...results.report import ReportData
from ...results.result import ModelResult
from ..plot.measures import accuracy
from ..plot.pareto import ParetoPlot, drawn_models, pareto
from ..tables.accuracy_tables import accuracy_tables
from ..tables.models_table import models_table
from ..tables.speed_tables import speeds
from ..tables.table import Table
from ..templates.rendering import render
from .headline import headline
from .layer_bars import layer_bars
from .numbers import every_number
from .text_samples import samples
from .time_bars import time_bars
from .training_curves import training_curves

_NARROW = 360
_WARNINGS_SHOWN = 6
_NAMES_SHOWN = 4

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading.

    Attributes:
        key: names its anchor and its template.
        title: the heading.
        data: what the template shows; an empty section is omitted.
    """

    key: str
    title: str
    data: Any


@dataclass(frozen=True)
class Tradeoff:
    """The plot in two widths, if two models can be drawn, and the table of all."""

    wide: ParetoPlot | None
    narrow: ParetoPlot | None
    note: str
    models: Table | None


@dataclass(frozen=True)
class CheckpointFacts:
    """What is known of a model's files."""

    name: str
    scheme: str
    facts: Facts


@dataclass(frozen=True)
class Made:
    """How a report came to be; recipes and settings are YAML."""

    machine: Facts
    versions: Facts
    checkpoints: list[CheckpointFacts]
    recipes: list[tuple[str, str]]
    settings: str


@dataclass(frozen=True)
class Warnings:
    """Those shown at once, and the rest."""

    shown: list[str]
    rest: list[str]


def page(report: ReportData) -> str:
    """The whole page. Missing measurements are omitted; external text is escaped."""
    style, script = (_beside_this_file(file) for file in ("style.css", "behaviour.js"))
    tradeoff = _tradeoff(report)
    sections = [
        Section("tradeoff", "Accuracy against speed" if tradeoff.wide else "Models", tradeoff),
        Section("accuracy", "Accuracy", accuracy_tables(report)),
        Section("speed", "Speed", speeds(report)),
        Section("time", "Where the time goes", time_bars(report)),
        Section("training", "Training", training_curves(report)),
        Section("layers", "Error by layer", layer_bars(report)),
        Section("samples", "Samples", samples(report)),
        Section("numbers", "Every number", every_number(report)),
        Section("made", "How it was made", _made(report)),
    ]
    machine = report.machine
    return render(
        "page.html.jinja",
        report=report,
        policy=_policy(style, script),
        style=style,
        script=script,
        embedded=_embedded(report),
        where=", ".join(filter(None, [machine.processor, _cores(machine.cores), machine.measured_on])),
        headline=headline(report),
        warnings=_warnings(report),
        sections=[section for section in sections if section.data],
    )


def _warnings(report: ReportData) -> Warnings:
    models: dict[str, list[str]] = {}
    for model in report.models:
        for warning in model.warnings:
            models.setdefault(warning, []).append(model.name)
    said = list(report.warnings)
    for warning, names in models.items():
        said.append(f"{', '.join(names) if len(names) <= _NAMES_SHOWN else f'{len(names)} models'}: {warning}")
    return Warnings(said[:_WARNINGS_SHOWN], said[_WARNINGS_SHOWN:])


def _tradeoff(report: ReportData) -> Tradeoff:
    drawn = set(drawn_models(report))
    absent = [model.name for i, model in enumerate(report.models) if i not in drawn]
    accurate = "of the difference from the baseline" if report.baseline else "of accuracy"
    said = f"Marks are the values; bars are 95% intervals {accurate} and the range of speed, if known."
    if accuracy(report) is not None and absent:
        said += f" Not drawn, as not both were measured: {', '.join(absent)}."
    if len(drawn) > 8:
        said += " Names are shown where there is room; the table lists all."
    return Tradeoff(pareto(report), pareto(report, _NARROW), said, models_table(report))


def _made(report: ReportData) -> Made:
    machine = report.machine
    operations = machine.operations_per_second
    product = "" if operations is None else f"{wording.number(operations / 1e9)} billion operations/s"
    if product and machine.operations_dtype:
        product += f" in {machine.operations_dtype}"
    reading = machine.read_bytes_per_second
    facts = [
        ("processor", machine.processor),
        ("cores in use", str(machine.cores)),
        ("memory", wording.bytes_(machine.memory_bytes)),
        ("system", machine.system),
        ("device", machine.device),
        ("speed measured on", machine.measured_on or ""),
        ("memory read rate", "" if reading is None else f"{wording.bytes_(reading)}/s"),
        ("matrix-product rate", product),
    ]
    return Made(
        machine=_known(facts),
        versions=_known(report.versions.items()),
        checkpoints=[_checkpoint(model) for model in report.models],
        recipes=[(model.name, _yaml(model.recipe)) for model in report.models if model.recipe],
        settings=_yaml(report.settings) if report.settings else "",
    )


def _checkpoint(model: ModelResult) -> CheckpointFacts:
    facts = [
        ("fingerprint", model.fingerprint),
        ("path", model.path or ""),
        ("reload", str((model.reload or {}).get("sentence", ""))),
        *((f"loads in {each.name}", each.sentence.removeprefix(f"{each.name}: ")) for each in model.loaders),
    ]
    return CheckpointFacts(model.name, model.scheme, _known(facts))


def _known(pairs: Iterable[tuple[str, str]]) -> Facts:
    return [(key, value) for key, value in pairs if value]


def _yaml(data: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(data, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=False)


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _embedded(report: ReportData) -> str:
    # No "<" reaches the page: neither </script> nor <!-- can end or change the element.
    return json.dumps(_finite(report.as_data())).replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    """Non-finite numbers as null, since JSON has none."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _beside_this_file(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")
