"""Text sources and the windows cut from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import calibration_windows, evaluation_windows
from transformers import AutoTokenizer

from ...tiny import REPOSITORY, SMELT_6M

CORPUS = REPOSITORY / "models" / "builtin" / "corpus"
TOKENIZER = AutoTokenizer.from_pretrained(SMELT_6M)


def _documents(half: str) -> list[str]:
    return [json.loads(line)["text"] for line in (CORPUS / f"{half}.jsonl").read_text().splitlines()]


def test_the_builtin_corpus_is_what_it_should_be() -> None:
    calibration, evaluation = _documents("calibration"), _documents("evaluation")
    assert len(calibration) + len(evaluation) >= 60
    assert sum(len(text.encode()) for text in calibration + evaluation) >= 40_000
    assert not set(calibration) & set(evaluation)
    windows = {text[i : i + 50] for text in calibration for i in range(0, len(text) - 50)}
    assert not any(text[i : i + 50] in windows for text in evaluation for i in range(0, len(text) - 50))


def test_it_feeds_the_quickstart() -> None:
    windows = calibration_windows(TextSource("builtin", "calibration"), TOKENIZER, 64, 256, seed=0)
    assert windows.tokens.shape == (64, 256)
    assert evaluation_windows(TextSource("builtin", "evaluation"), TOKENIZER, 64, 256).tokens.shape == (64, 256)


def test_windows_are_the_texts_own_tokens_in_order(tmp_path: Path) -> None:
    text = "\n\n".join(_documents("calibration")[:8])
    (tmp_path / "text.txt").write_text(text)
    expected = TOKENIZER(text, add_special_tokens=False).input_ids
    found = evaluation_windows(TextSource(str(tmp_path / "text.txt"), "evaluation"), TOKENIZER, 10, 50)
    assert found.tokens.flatten().tolist() == expected[:500]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_long_text_gives_the_tokens_of_the_whole(kind: str, tmp_path: Path) -> None:
    """It reaches the tokenizer in pieces, which must not show."""
    lines = [line for text in _documents("calibration") for line in text.splitlines() if line]
    text = "\n".join(lines * 3)
    assert len(text) > 200_000
    path = tmp_path / f"text.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}))
    expected = TOKENIZER(text, add_special_tokens=False).input_ids
    found = evaluation_windows(TextSource(str(path), "evaluation"), TOKENIZER, 10**6, 50).tokens.flatten().tolist()
    assert found == expected[: len(found)]
    assert len(found) > len(expected) - 50


def test_a_seed_chooses_windows_and_the_same_seed_chooses_the_same() -> None:
    source = TextSource("builtin", "calibration")
    first, again, other = (calibration_windows(source, TOKENIZER, 16, 64, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    assert len({tuple(row) for row in first.tokens.tolist()}) == 16


def test_windows_begin_as_the_tokenizer_begins_texts(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    windows = evaluation_windows(TextSource("builtin", "evaluation"), tokenizer, 4, 32).tokens
    assert windows.shape == (4, 32)
    assert all((row[0] == tokenizer.bos_token_id) == begins for row in windows)
    plain = evaluation_windows(TextSource("builtin", "evaluation"), TOKENIZER, 4, 32).tokens
    assert TOKENIZER("a").input_ids[0] != TOKENIZER.bos_token_id
    assert (plain[:, 0] != TOKENIZER.bos_token_id).all()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "dataset"])
def test_every_kind_of_source_gives_a_checkpoint(
    kind: str, recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    texts = _documents("calibration")[:6]
    if kind == "txt":
        source = tmp_path / "text.txt"
        source.write_text("\n\n".join(texts))
    elif kind == "jsonl":
        source = tmp_path / "text.jsonl"
        source.write_text("\n".join(json.dumps({"body": text}) for text in texts))
    else:
        source = tmp_path / "dataset"
        source.mkdir()
        (source / "train.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    field = {} if kind == "txt" else {"field": "body"}
    top = {"calibrate": {"source": str(source), "samples": 8, "length": 32, **field}, "evaluate": False}
    result = run(recipe(tiny(), top, group_size=32, rounding="gptq"))
    data = json.loads((result.checkpoint / "smelt.json").read_text())["data"]
    assert data["source"] == str(source)
    # The same texts make the same windows, whatever they are kept in.
    plain = calibration_windows(TextSource(str(source), "calibration", **field), TOKENIZER, 8, 32, 0)
    assert data["sha256"] == plain.fingerprint


@pytest.mark.slow
def test_self_written_text(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    top = {"calibrate": {"source": "self", "samples": 6, "length": 24}, "evaluate": False}
    results = []
    for name in ("a", "b"):
        built = recipe("builtin:smelt-6m", top | {"output": str(tmp_path / name)}, group_size=64, rounding="gptq")
        results.append(run(built))
    first, second = ((r.checkpoint / "model.safetensors").read_bytes() for r in results)
    assert first == second
    assert "self" in (results[0].checkpoint / "smelt.json").read_text()
