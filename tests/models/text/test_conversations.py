"""Calibration and evaluation on conversations, as the model's own template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smelt.compress import Recipe, SmeltError, run
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import calibration_windows, evaluation_windows, used_tokens
from smelt.runtime.measure.workload import text_prompts
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...tiny import SMELT_6M

# As Llama's: the beginning of a text is the template's own.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALKS = [
    [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]
    for number in range(40)
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(SMELT_6M)
    found.chat_template = TEMPLATE
    return found


def source_of(path: Path, *records: Any) -> TextSource:
    path.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    return TextSource(str(path), "calibration", field="messages")


def test_windows_are_cut_from_what_the_template_writes(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = source_of(tmp_path / "chat.jsonl", *TALKS)
    expected: list[int] = []
    for talk in TALKS:
        expected += tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    windows = evaluation_windows(source, tokenizer, 4, 32)
    assert windows.tokens.flatten().tolist() == expected[: 4 * 32]
    chosen = calibration_windows(source, tokenizer, 5, 32, seed=0).tokens
    pieces = [expected[start : start + 32] for start in range(0, len(expected) - 31, 32)]
    assert all(window in pieces for window in chosen.tolist())
    assert used_tokens(source, tokenizer) >= set(expected)
    drafted = text_prompts(tokenizer, 16, source)(16, 0)
    assert any(expected[start : start + 16] == drafted for start in range(len(expected)))


def test_a_window_begins_once(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """With tokenizers and templates that both write the beginning of a text, as Llama 3's do."""
    bos, number = str(tokenizer.eos_token), tokenizer.eos_token_id
    tokenizer.bos_token = bos
    single = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    tokenizer.backend_tokenizer.post_processor = single
    expected = [id for talk in TALKS for id in tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)]
    windows = evaluation_windows(source_of(tmp_path / "chat.jsonl", *TALKS), tokenizer, 4, 32).tokens
    assert expected[0] == number
    assert windows[0].tolist() == expected[:32]
    assert windows[1].tolist() == [number, *expected[32 : 32 + 31]]


def test_texts_between_conversations(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    talk = TALKS[0]
    source = source_of(tmp_path / "mixed.jsonl", "One.", "Two.", talk, "Three.")
    whole = tokenizer.decode(evaluation_windows(source, tokenizer, 1, 24).tokens[0])
    assert whole == ("One.\n\nTwo." + tokenizer.apply_chat_template(talk, tokenize=False) + "Three.")[: len(whole)]
    assert "It is 1." in whole


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([{"from": "human", "value": "Hello"}], "field 'messages' holds a list that is not of messages with roles"),
        (["Hello"], "field 'messages' holds a list that is not of messages with roles"),
        ({"role": "user", "content": "Hello"}, "field 'messages' holds dict, not text"),
        ([{"role": "user", "content": {"deep": 1}}], "the model's chat template refuses this conversation"),
    ],
)
def test_what_is_no_conversation(
    record: Any, expected: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content + ''")
    with pytest.raises(SmeltError) as caught:
        calibration_windows(source_of(tmp_path / "chat.jsonl", record), tokenizer, 1, 8, 0)
    assert expected in str(caught.value)


def test_a_recipe_calibrates_on_conversations(
    recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source_of(tmp_path / "chat.jsonl", *TALKS)
    where = {"length": 16, "field": "messages"}
    top = {
        "calibrate": where | {"source": str(tmp_path / "chat.jsonl"), "samples": 8},
        "evaluate": where | {"text": str(tmp_path / "chat.jsonl"), "windows": 4, "speed": False},
    }
    model = tiny()
    given = recipe(model, top, group_size=32, rounding="gptq")
    with pytest.raises(SmeltError, match="holds messages, and the model has no chat template to write them"):
        run(given)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    result = run(given)
    assert all(model.text and model.text.perplexity > 1 for model in result.report.models)
