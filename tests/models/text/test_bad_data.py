"""Calibration and evaluation text that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from smelt.compress import Recipe, SmeltError, run
from smelt.models.text.windows import TextSource, calibration_windows
from transformers import AutoTokenizer

from ...tiny import SMELT_6M


@pytest.fixture
def refused(recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    def call(calibrate: dict[str, object] | None = None, evaluate: dict[str, object] | None = None) -> str:
        top = {
            "calibrate": {"samples": 4, "length": 16} | (calibrate or {}),
            "evaluate": {"windows": 2, "length": 16, "speed": False} | (evaluate or {}),
        }
        with pytest.raises(SmeltError) as caught:
            run(recipe(tiny(), top, group_size=32, rounding="gptq"))
        assert not (tmp_path / "out" / "checkpoint").exists()
        return str(caught.value)

    return call


@pytest.mark.parametrize("where", ["calibrate", "evaluate"])
@pytest.mark.parametrize(
    ("content", "suffix", "expected"),
    [
        (b"", ".txt", "holds no text"),
        (b" \n\n ", ".txt", "holds no text"),
        (b"", ".jsonl", "holds no text"),
        (b"a few words", ".txt", "too short"),
        (b"caf\xe9 " * 200, ".txt", "is not UTF-8"),
        (b'{"text": "caf\xe9"}\n', ".jsonl", ":1: is not UTF-8"),
        (b'{"text": "fine"}\n{"text": \n', ".jsonl", ":2: is not JSON"),
        (b'{"body": "fine"}\n', ".jsonl", "has no field 'text'; available: body"),
        (b'["fine"]\n', ".jsonl", "has no field 'text'; available: list"),
        (b'{"text": 3}\n', ".jsonl", "holds int, not text"),
    ],
)
def test_bad_files(
    where: str, content: bytes, suffix: str, expected: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / f"text{suffix}"
    file.write_bytes(content)
    key = "source" if where == "calibrate" else "text"
    sentence = refused(**{where: {key: str(file)}})
    assert expected in sentence
    assert str(file) in sentence


def test_too_short_says_how_much_there_is(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The lighthouse keeper counted the steps again. " * 20)
    sentence = refused({"source": str(file), "samples": 500})
    assert "500 samples of 16 tokens need 8000 tokens" in sentence
    assert "ask for" in sentence


@pytest.mark.parametrize("samples", [8, 50, 500])
def test_what_is_asked_for_instead_is_enough(samples: int, tmp_path: Path) -> None:
    """The sentence names a number of samples or a length; with it there is text enough, and with one more there is not."""
    file = tmp_path / "text.txt"
    file.write_text("The lighthouse keeper counted the steps again. " * 10)
    source, tokenizer = TextSource(str(file), "calibration"), AutoTokenizer.from_pretrained(SMELT_6M)
    with pytest.raises(SmeltError) as caught:
        calibration_windows(source, tokenizer, samples, 256, 0)
    asked = re.search(r"ask for a length of at most (\d+)", str(caught.value))
    if samples == 500:
        assert asked is None  # not for so many
        return
    assert asked is not None
    length = int(asked.group(1))
    assert calibration_windows(source, tokenizer, samples, length, 0).tokens.shape == (samples, length)
    with pytest.raises(SmeltError, match="too short"):
        calibration_windows(source, tokenizer, samples, length + 1, 0)


def test_a_missing_file_is_found_before_any_work(refused: Callable[..., str], tmp_path: Path) -> None:
    sentence = refused({"source": "nowhere.jsonl"}, {"text": "neither.txt"})
    assert "calibrate.source" in sentence
    assert "evaluate.text" in sentence
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_cannot_be_had(refused: Callable[..., str]) -> None:
    assert "neither a text file nor a dataset that can be loaded" in refused({"source": "nobody/no-such-dataset"})


def test_windows_longer_than_the_model_reads(refused: Callable[..., str]) -> None:
    sentence = refused({"length": 4096}, {"length": 512})
    assert "calibrate.length: 4096 tokens exceed the model's context length; use at most 128" in sentence
    assert "evaluate.length: 512" in sentence


def test_a_wrong_field_of_a_good_file(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "one", "body": "two"}) + "\n")
    assert "has no field 'content'; available: text, body" in refused({"source": str(file), "field": "content"})
