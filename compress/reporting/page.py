"""A report as one HTML file that needs nothing else: no network, no server, and no JavaScript to be read."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import yaml

from ..results.result import ModelResult
from . import wording
from .accuracy_tables import accuracy_tables, named
from .headline import headline
from .layer_bars import layer_bars
from .markup import Cell, Row, bullets, esc, facts, fold, name, section, table
from .measures import accuracy
from .numbers import every_number
from .pareto import drawn_models, pareto_svg
from .report import ReportData
from .samples import samples
from .speed_tables import kernel_tables, speed_tables
from .time_bars import time_bars
from .training_curves import training_curves

_NARROW = 360
_WARNINGS_SHOWN = 6
_NAMES_SHOWN = 4


def page(report: ReportData) -> str:
    """The whole page. What was not measured is left out; what comes from outside is escaped."""
    style, script = (_beside_this_file(file) for file in ("style.css", "behaviour.js"))
    sections = [
        ("tradeoff", "Accuracy against speed" if pareto_svg(report) else "Models", _tradeoff(report)),
        ("accuracy", "Accuracy", accuracy_tables(report)),
        ("speed", "Speed", speed_tables(report) + kernel_tables(report)),
        ("time", "Where the time goes", time_bars(report)),
        ("training", "Training", training_curves(report)),
        ("layers", "Error by layer", layer_bars(report)),
        ("samples", "Samples", samples(report)),
        ("numbers", "Every number", fold("Show the table", every_number(report))),
        ("made", "How it was made", _made(report)),
    ]
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<li><a href="#{key}">{esc(title)}</a></li>' for key, title, _ in shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{esc(report.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{_header(report)}\n"
        f'<nav aria-label="Contents"><ol>{links}</ol></nav>\n<main>\n'
        + "\n".join(section(*parts) for parts in shown)
        + f"\n</main>\n<footer><p>Made by Smelt {esc(report.versions.get('smelt', ''))}. This file holds its data"
        " as JSON, in the schema <code>" + esc(report.schema_) + "</code>. "
        '<button type="button" id="download" hidden>Download the JSON</button></p></footer>\n'
        f'<script type="application/json" id="report">{_embedded(report)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(report: ReportData) -> str:
    banner = ""
    if report.status == "partial":
        missing = bullets(report.missing)
        banner = (
            '<div class="banner" role="note"><strong>This report is partial.</strong> '
            f"{'It lacks:' if missing else 'Not everything that was asked for was measured.'}{missing}</div>"
        )
    machine = report.machine
    where = ", ".join(filter(None, [machine.processor, _cores(machine.cores), machine.measured_on]))
    return (
        f'<header><p class="kicker">Smelt report <span>{esc(where)}</span></p><h1>{name(report.title)}</h1>'
        f'<p class="verdict">{esc(report.verdict)}</p>{banner}{headline(report)}{_warnings(report)}</header>'
    )


def _warnings(report: ReportData) -> str:
    models: dict[str, list[str]] = {}
    for model in report.models:
        for warning in model.warnings:
            models.setdefault(warning, []).append(model.name)
    said = list(report.warnings)
    for warning, names in models.items():
        said.append(f"{', '.join(names) if len(names) <= _NAMES_SHOWN else f'{len(names)} models'}: {warning}")
    rest = said[_WARNINGS_SHOWN:]
    body = bullets(said[:_WARNINGS_SHOWN]) + fold(f"{len(rest)} more", bullets(rest))
    return f'<aside class="warnings"><h2>Warnings</h2><div>{body}</div></aside>' if said else ""


def _tradeoff(report: ReportData) -> str:
    wide, narrow = pareto_svg(report), pareto_svg(report, _NARROW)
    models = _models(report)
    if wide is None or narrow is None:
        return models
    drawn = set(drawn_models(report))
    absent = [model.name for i, model in enumerate(report.models) if i not in drawn]
    accurate = "of the difference from the baseline" if report.baseline else "of accuracy"
    said = f"The value is at the mark; bars are 95% intervals {accurate} and the range of speed, where there are any."
    if accuracy(report) is not None and absent:
        said += f" Not drawn, since not both were measured: {', '.join(absent)}."
    if len(drawn) > 8:
        said += " Names stand where there is room; the table has them all."
    return (
        f'<figure class="plot"><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption><small>{esc(said)}</small></figcaption></figure>{models}"
    )


def _models(report: ReportData) -> str:
    rows: list[Row] = []
    for i, model in enumerate(report.models):
        size, text, speed = model.size, model.text, model.speed
        linear = size.linear_bits_per_weight
        cells: list[Cell | None] = [
            named(report, model),
            Cell(esc(model.scheme)),
            Cell(wording.bytes_(size.bytes), size.bytes),
            Cell(wording.fixed(size.bits_per_weight, 2), size.bits_per_weight),
            None if linear is None else Cell(wording.fixed(linear, 2), linear),
            None if text is None else Cell(wording.perplexity(text.perplexity), text.perplexity),
            None if speed is None else Cell(wording.number(speed.decode_rate.median), speed.decode_rate.median),
        ]
        rows.append((i, cells))
    heads = ["model", "scheme", "checkpoint", "bits per weight", "in quantized linears", "perplexity"]
    return table("Models", [*heads, "decode, tokens/s"], rows, words=["scheme"])


def _made(report: ReportData) -> str:
    machine = report.machine
    operations = machine.operations_per_second
    product = "" if operations is None else f"{wording.number(operations / 1e9)} billion operations/s"
    if product and machine.operations_dtype:
        product += f" in {machine.operations_dtype}"
    reading = machine.read_bytes_per_second
    out = "<h3>Machine</h3>" + facts(
        [
            ("processor", machine.processor),
            ("cores in use", str(machine.cores)),
            ("memory", wording.bytes_(machine.memory_bytes)),
            ("system", machine.system),
            ("device", machine.device),
            ("speed measured on", machine.measured_on or ""),
            ("reads memory at", "" if reading is None else f"{wording.bytes_(reading)}/s"),
            ("multiplies matrices at", product),
        ]
    )
    out += "<h3>Versions</h3>" + facts(report.versions.items()) if report.versions else ""
    out += "<h3>Checkpoints</h3>" + "".join(_checkpoint(model) for model in report.models)
    recipes = [fold(f"Recipe of {name(m.name)}", _yaml(m.recipe)) for m in report.models if m.recipe]
    settings = fold("What was asked to be measured", _yaml(report.settings)) if report.settings else ""
    return out + (f"<h3>Recipes and settings</h3>{''.join(recipes)}{settings}" if recipes or settings else "")


def _checkpoint(model: ModelResult) -> str:
    said = facts(
        [
            ("fingerprint", model.fingerprint),
            ("path", model.path or ""),
            ("reload", str((model.reload or {}).get("sentence", ""))),
            *((f"loads in {each.name}", each.sentence.removeprefix(f"{each.name}: ")) for each in model.loaders),
        ]
    )
    return fold(f"{name(model.name)} <small>{esc(model.scheme)}</small>", said)


def _yaml(data: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(data, default=str))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f'<pre tabindex="0"><code>{esc(text)}</code></pre>'


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _embedded(report: ReportData) -> str:
    # No "<" reaches the page: neither </script> nor <!-- can end or change the element.
    return json.dumps(_finite(report.as_data())).replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    """JSON has no infinity; what is not finite is null."""
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
