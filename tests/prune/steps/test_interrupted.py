"""Prune steps that go block by block: interrupted after a block, they end with the bytes of a run in one piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import run

from ...interruption import note_parts
from .recipe import recipe_of


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "dtype", "settings"),
    [
        ("llama", torch.bfloat16, {"structure": "weights", "sparsity": 0.5, "update": "sparsegpt"}),
        ("llama", torch.bfloat16, {"structure": "weights", "sparsity": 0.5, "allocation": "owl"}),
        ("llama", torch.bfloat16, {"structure": "ffn", "ratio": 0.5, "update": "least_squares"}),
        ("qwen3_moe", torch.float32, {"structure": "experts", "count": 1}),
    ],
    ids=["weights", "owl", "ffn", "experts"],
)
def test_interrupted_after_a_block_it_goes_on(
    architecture: str,
    dtype: torch.dtype,
    settings: dict[str, Any],
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, step = tiny(architecture, dtype), {"prune": settings}
    quiet = run(recipe_of(model, tmp_path / "quiet", step))
    saved = note_parts(monkeypatch, interrupt_at=2)
    recipe = recipe_of(model, tmp_path / "out", step)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    resumed = run(recipe)
    passes = 2 if "allocation" in settings else 1  # OWL counts outliers first
    assert saved == [f"block-0000{i}.safetensors" for i in range(3)] * passes
    name = "model.safetensors"
    assert (resumed.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()
