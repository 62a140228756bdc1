"""The layers through torch.compile, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.decoder.compiled import CompiledOperators

from ...tiny import make_model, save_model
from ..drive import logits_in_pieces
from .test_architectures import VARIANTS

DRAW = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(4, 4096, (length,), generator=DRAW).tolist() for length in (23, 13)]
PIECES = [[(0, 14)], [(1, 12), (0, 7)], [(0, 1), (1, 1)], [(0, 1)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    VARIANTS,
    ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain",
)
def test_logits_are_those_of_transformers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(architecture, **changes)
    path = save_model(model, tmp_path)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    operators = CompiledOperators(torch.float32)
    for found, reference in zip(logits_in_pieces(path, PROMPTS, PIECES, operators), expected, strict=True):
        assert (found - reference).abs().max() <= 1e-4 * max(1.0, reference.abs().max().item())
    lowered = operators.lowered
    assert lowered.graphs >= 2  # one token, and several
    assert 0 < lowered.after < lowered.before
    assert f"{lowered.before} operators" in lowered.sentence()


@pytest.mark.slow
def test_the_engine_generates_what_it_does_without(tmp_path: Path) -> None:
    path = save_model(make_model("llama", num_hidden_layers=1), tmp_path)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "quiet": True}
    engine = Engine(path, compile=True, **options)
    found = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)]
    assert found == [o.outputs[0].token_ids for o in Engine(path, **options).generate(PROMPTS, params)]
    assert "kernels of its own" in engine.explain()["layers"]
