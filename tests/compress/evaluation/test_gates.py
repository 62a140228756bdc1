"""Gates that stand and gates that fall."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.compress import SmeltError
from smelt.compress.evaluation.gates import Gate, raise_unmeasured
from smelt.compress.evaluation.settings import Evaluate

from ..report_samples import full, minimal

TASK = """task: colours
dataset_path: json
dataset_kwargs: {{data_files: {items}}}
test_split: train
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def _fallen(text: str) -> list[str]:
    return Gate.parse(text).fallen(full())


def _against(field: str) -> list[float]:
    found = [getattr(model.against, field).ratio for model in full().candidates if model.against]
    assert found
    return found


def test_a_change_in_percent_falls_above_its_bound_only() -> None:
    worst = max(100 * (ratio - 1) for ratio in _against("perplexity"))
    assert _fallen(f"ppl>+{worst + 0.1:.3f}%") == []
    sentences = _fallen(f"ppl>+{worst - 0.1:.3f}%")
    assert len(sentences) == 1
    assert f"ppl {worst:+.2f}%" in sentences[0]
    assert "0.10% above the bound" in sentences[0]


def test_a_speedup_falls_below_its_bound_only() -> None:
    slowest = min(_against("decode"))
    assert _fallen(f"decode_speedup<{slowest * 0.99}") == []
    (sentence,) = _fallen(f"decode_speedup<{slowest * 1.01}")
    assert f"decode_speedup {slowest:.4g}" in sentence
    assert "below the bound" in sentence


def test_what_was_not_measured_falls_too() -> None:
    (sentence,) = Gate.parse("decode_speedup<1.5").fallen(minimal())
    assert "was not measured" in sentence


def test_absolute_bounds_and_tasks() -> None:
    candidate = full().candidates[0]
    assert candidate.text is not None
    assert _fallen(f"ppl>{candidate.text.perplexity * 100}") == []
    assert Gate.parse("ppl>1").fallen(full())
    task = candidate.tasks[0]
    assert any(task.task in sentence for sentence in _fallen(f"task:{task.task}<{task.value + 1000}"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ppl", "expected a metric, < or >, and a number"),
        ("ppl>much", "expected a metric"),
        ("pl>+2%", "unknown metric 'pl'.*did you mean ppl"),
        ("decode_speedup<50%", "remove the %"),
    ],
)
def test_a_gate_that_cannot_be_understood_is_reported(text: str, sentence: str) -> None:
    with pytest.raises(SmeltError, match=sentence):
        Gate.parse(text)


def test_a_task_that_is_not_measured_is_found_before_anything_is(tmp_path: Path) -> None:
    task = tmp_path / "colours.yaml"
    items = tmp_path / "items.jsonl"
    items.write_text('{"text": "The sky is", "choices": [" blue", " green"]}\n')
    task.write_text(TASK.format(items=items))
    settings = Evaluate(tasks=[str(task)])
    raise_unmeasured([Gate.parse("task:colours<0.5")], settings, baseline=False)
    with pytest.raises(
        SmeltError, match=r"--fail-if 'task:colors<0.5': colors is none of the tasks; did you mean colours"
    ):
        raise_unmeasured([Gate.parse("task:colors<0.5")], settings, baseline=False)
