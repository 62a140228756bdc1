"""Calibration text that the model writes itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe
from smelt.compress.pipeline.plan import Plan
from smelt.compress.pipeline.self_text import self_written_windows
from smelt.compress.recipe.recipe import Calibrate
from smelt.models.directory.directory import ModelDirectory
from smelt.models.text.windows import Windows
from smelt.system.progress import Progress
from transformers import AutoModelForCausalLM

from ...tiny import SMELT_6M


def _written(path: Path, begun: Path, samples: int = 40, length: int = 16) -> Windows:
    settings = Calibrate(source="self", samples=samples, length=length)
    return self_written_windows(ModelDirectory("model", path), settings, 3, begun, Progress(False))


def test_it_is_a_sample_of_what_the_model_says(tmp_path: Path) -> None:
    tokens = _written(SMELT_6M, tmp_path / "begun", samples=40, length=48).tokens
    with torch.no_grad():
        said = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)(tokens).logits.log_softmax(-1)
    said = said[:, :-1]
    # Of a sample, the mean of -log p is the entropy.
    excess = -said.gather(-1, tokens[:, 1:, None])[..., 0] + (said.exp() * said).sum(-1)
    error = float(excess.mean(1).std()) / len(tokens) ** 0.5
    assert abs(float(excess.mean())) < 4 * error
    assert error < 0.1
    assert len(set(tokens[:, 0].tolist())) > 30


def test_an_interrupted_one_goes_on_to_the_same_text(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    whole = _written(SMELT_6M, begun)
    assert begun.stat().st_size == 40 * 16 * 4
    begun.write_bytes(begun.read_bytes()[: 35 * 16 * 4 + 5])  # killed in the middle of the second group
    assert _written(SMELT_6M, begun).fingerprint == whole.fingerprint
    changed = bytearray(begun.read_bytes())
    changed[0] ^= 1
    begun.write_bytes(changed)
    again = _written(SMELT_6M, begun)  # what is there is not written again
    assert (again.tokens != whole.tokens).sum() == 1


@pytest.mark.parametrize("length", [2, 16])
def test_it_begins_as_texts_do(length: int, tmp_path: Path) -> None:
    path = shutil.copytree(SMELT_6M, tmp_path / "model")
    file = path / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    bos = next(token["content"] for token in data["added_tokens"] if token["id"] == 0)
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    file.write_text(json.dumps(data), encoding="utf-8")
    tokens = _written(path, tmp_path / "begun", length=length).tokens
    assert tokens.shape == (40, length)
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1] > 5).all() or length == 2  # none of the special ones
    assert len(set(tokens[:, 1].tolist())) > 5


def test_a_model_that_the_runtime_does_not_know_is_refused_before_any_work(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    path = tiny()
    for file in path.glob("*.safetensors"):
        file.unlink()
    BloomForCausalLM(BloomConfig(vocab_size=4096, hidden_size=64, n_layer=2, n_head=4)).save_pretrained(path)
    top = {"calibrate": {"source": "self", "samples": 2, "length": 16}, "evaluate": False}
    plan = Plan.make(recipe(path, top, group_size=32, rounding="gptq"))
    (problem,) = plan.problems
    assert str(problem).startswith("calibrate.source: the runtime cannot generate text with the model")
    assert "does not know the architecture 'bloom'" in str(problem)
    # Nothing is read, so nothing is written.
    assert not Plan.make(recipe(path, top, group_size=32, rounding="nearest")).problems
