"""Generated text of the models, side by side, and where each departs from the baseline's."""

from __future__ import annotations

from dataclasses import dataclass

from ...results.report import ReportData


@dataclass(frozen=True)
class WrittenText:
    """A text, and the models that wrote it.

    Attributes:
        models: names, and whether each is the baseline's.
        same: the text up to where it departs from the baseline's.
        differs: the rest; None if it is the same.
    """

    models: list[tuple[str, bool]]
    same: str
    differs: str | None


@dataclass(frozen=True)
class Prompt:
    """A prompt and its continuations."""

    prompt: str
    written: list[WrittenText]


def samples(report: ReportData) -> list[Prompt]:
    """For each prompt the models' texts side by side; models with the same text share a column."""
    prompts = list(dict.fromkeys(s.prompt for model in report.models for s in model.samples))
    return [_prompt(report, prompt) for prompt in prompts]


def _prompt(report: ReportData, prompt: str) -> Prompt:
    original = next((s.text for s in report.baseline.samples if s.prompt == prompt), None) if report.baseline else None
    written: dict[str, list[int]] = {}
    for i, model in enumerate(report.models):
        for sample in model.samples:
            if sample.prompt == prompt:
                written.setdefault(sample.text, []).append(i)
    return Prompt(prompt, [_written(report, text, models, original) for text, models in written.items()])


def _written(report: ReportData, text: str, models: list[int], original: str | None) -> WrittenText:
    names = [(report.models[i].name, report.models[i].role == "baseline") for i in models]
    if original is None or text == original:
        return WrittenText(names, text, None)
    at = _whole_words(text, _shared(text, original))
    return WrittenText(names, text[:at], text[at:])


def _shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _whole_words(text: str, at: int) -> int:
    """Back to the beginning of the word at ``at``, if it began within reach."""
    start = at
    while start > 0 and at - start < 24 and not text[start - 1].isspace():
        start -= 1
    return start if start == 0 or text[start - 1].isspace() else at
