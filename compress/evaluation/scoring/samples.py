"""Continuations of prompts by several models, side by side."""

from __future__ import annotations

from itertools import islice

from ....models.text.text_source import TextSource
from ....runtime import Engine, RuntimeProblem, SamplingParams
from ....system.errors import SmeltError
from ...results.result import Sample

_WORDS = 24
# Generated for each prompt.
SAMPLE_TOKENS = 48


def prompts(source: TextSource, count: int) -> list[str]:
    """The first words of the first documents."""
    found = []
    for document in islice((d for d in source.documents() if isinstance(d, str) and d.strip()), count):
        words = document.split()
        found.append(" ".join(words[:_WORDS]))
    return found


def continuations(engine: Engine, beginnings: list[str], name: str) -> list[Sample]:
    """Each prompt and its greedy continuation."""
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0)
    try:
        outputs = engine.generate(beginnings, params) if beginnings else []
    except RuntimeProblem as problem:
        raise SmeltError(f"samples of {name}: {problem}") from None
    broken = next((output.error for output in outputs if output.error), None)
    if broken:
        raise SmeltError(f"samples of {name}: {broken}")
    return [
        Sample(prompt=beginning, text=output.outputs[0].text or "")
        for beginning, output in zip(beginnings, outputs, strict=True)
    ]
