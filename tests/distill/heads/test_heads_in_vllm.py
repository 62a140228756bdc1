"""vLLM reads draft heads that Smelt trains, and drafts the same tokens with them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress.cli import app
from smelt.runtime import Engine, SamplingParams
from typer.testing import CliRunner

from ...tiny import SMELT_6M
from ...vllm.asked import ask_vllm, vllm_python

PROMPTS = [
    [int(t) for t in torch.randint(4, 4000, (n,), generator=torch.Generator().manual_seed(n))] for n in range(9, 57, 6)
]
COUNT = 48
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm")]


@dataclass(frozen=True)
class Answers:
    """Greedy tokens after each prompt, and how many there were after each step.

    Attributes:
        tokens: of each prompt.
        steps: of each prompt; a draft's accepted tokens come in one step.
    """

    tokens: list[list[int]]
    steps: list[list[int]]


def _of_engine(model: Path, head: Path) -> Answers:
    found = Answers([[] for _ in PROMPTS], [[] for _ in PROMPTS])
    options: dict[str, Any] = {"quiet": True, "max_model_len": 128, "max_num_seqs": len(PROMPTS)}
    with closing(Engine(str(model), drafter=str(head), draft_tokens=3, **options)) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True), id=str(i))
        while any(len(tokens) < COUNT for tokens in found.tokens):
            for output in engine.step():
                found.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
                found.steps[int(output.request_id)].append(len(output.outputs[0].token_ids))
    return found


def _of_vllm(place: Path, model: Path, head: Path, dtype: str) -> Answers:
    place.mkdir()
    found = ask_vllm(place, {"model": model}, PROMPTS, COUNT, heads={"model": str(head)}, dtype=dtype)["model"]
    assert "refused" not in found, found
    return Answers(**found)


def _in_float32(source: Path, directory: Path) -> Path:
    """The same numbers, which leave no choice to rounding."""
    shutil.copytree(source, directory)
    for file in directory.glob("*.safetensors"):
        tensors = {name: t.float() if t.is_floating_point() else t for name, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}))
    return directory


def _trained(output: Path, *more: str) -> Path:
    command = ["distill", str(SMELT_6M), "--for-drafting", "--head", "--output", str(output), "--tokens", "40k", *more]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return output / "checkpoint"


@pytest.fixture(scope="module")
def vllm() -> None:
    """Skip before a head is trained."""
    vllm_python()


@pytest.mark.parametrize("vocabulary", [4096, 1000])
def test_a_trained_head_drafts_the_same_tokens_in_vllm(vocabulary: int, tmp_path: Path) -> None:
    head = _in_float32(_trained(tmp_path / "run", "--draft-vocabulary", str(vocabulary)), tmp_path / "head")
    model = _in_float32(SMELT_6M, tmp_path / "model")
    theirs, ours = _of_vllm(tmp_path / "vllm", model, head, "float32"), _of_engine(model, head)
    assert ours == theirs
    assert sum(map(len, ours.steps)) < 0.85 * COUNT * len(PROMPTS)  # many are accepted


def test_vllm_accepts_as_much_of_a_rounded_head(tmp_path: Path) -> None:
    """In bfloat16, whose rounding changes tokens here and there."""
    head = _trained(tmp_path / "run", "--scheme", "W4A16")
    theirs, ours = _of_vllm(tmp_path / "vllm", SMELT_6M, head, "bfloat16"), _of_engine(SMELT_6M, head)
    counts = [sum(map(len, each.steps)) for each in (theirs, ours)]
    assert max(counts) < 0.9 * COUNT * len(PROMPTS)
    assert max(counts) < 1.05 * min(counts)
