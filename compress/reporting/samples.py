"""What the models write, side by side, and where each leaves the baseline's words."""

from __future__ import annotations

from .markup import esc, name
from .report import ReportData


def samples(report: ReportData) -> str:
    """For each prompt the models' texts beside each other; models that wrote the same share a column."""
    prompts = list(dict.fromkeys(s.prompt for model in report.models for s in model.samples))
    return "".join(_prompt(report, prompt) for prompt in prompts)


def _prompt(report: ReportData, prompt: str) -> str:
    original = next((s.text for s in report.baseline.samples if s.prompt == prompt), None) if report.baseline else None
    written: dict[str, list[int]] = {}
    for i, model in enumerate(report.models):
        for sample in model.samples:
            if sample.prompt == prompt:
                written.setdefault(sample.text, []).append(i)
    columns = "".join(_column(report, text, models, original) for text, models in written.items())
    return f'<h3 class="prompt"><span>Prompt</span> {esc(prompt)}</h3><div class="samples">{columns}</div>'


def _column(report: ReportData, text: str, models: list[int], original: str | None) -> str:
    heads = []
    for i in models:
        tag = " <small>baseline</small>" if report.models[i].role == "baseline" else ""
        heads.append(f"{name(report.models[i].name)}{tag}")
    body = esc(text)
    if original is not None and text != original:
        at = _whole_words(text, _shared(text, original))
        body = (
            f'{esc(text[:at])}<ins title="From here on it differs from the baseline.">'
            f'<span class="unseen">[differs from here] </span>{esc(text[at:])}</ins>'
        )
    return f'<article class="sample"><h4>{", ".join(heads)}</h4><p dir="auto">{body}</p></article>'


def _shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _whole_words(text: str, at: int) -> int:
    """Back to the beginning of the word at ``at``, if it began within reach."""
    start = at
    while start > 0 and at - start < 24 and not text[start - 1].isspace():
        start -= 1
    return start if start == 0 or text[start - 1].isspace() else at
