"""Text read on several ranks: the single process' hidden states and logits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress.evaluation.scoring import runtime_reader
from smelt.compress.evaluation.scoring.runtime_reader import RuntimeReader
from smelt.runtime import EngineConfig
from smelt.runtime.engine.setup.loading import load_model
from smelt.system.progress import Progress
from torch import Tensor

from ....tiny import from_transformers

TOKENS = torch.randint(4, 4096, (3, 40), generator=torch.Generator().manual_seed(1))


def read(path: Path, directory: Path, **options: object) -> Tensor:
    """Logits of all windows."""
    reader = RuntimeReader(path, directory, EngineConfig(quiet=True, **options))
    store = reader.final_hidden(TOKENS, Progress(False), "")
    try:
        return reader.head()(store.read(slice(None)))
    finally:
        store.close()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma2", {"tp": 2}),  # a tied head with a soft cap
        pytest.param("opt", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"tp": 2, "pp": 2, "enable_expert_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_transformers(
    tiny: Callable[..., Path], tmp_path: Path, architecture: str, options: dict[str, object]
) -> None:
    changes = {"word_embed_proj_dim": 32} if architecture == "opt" else {}  # states are narrower than the layers
    path = tiny(architecture, **changes)
    with torch.no_grad():
        wanted = from_transformers(path)(TOKENS).logits
    torch.testing.assert_close(read(path, tmp_path, **options), wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(read(path, tmp_path), wanted, atol=2e-4, rtol=1e-4)


def test_the_layers_are_gone_after_reading(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that two models are never in memory together."""
    loaded: list[weakref.ref[object]] = []

    def noted(*given: Any, **options: Any) -> Any:
        checkpoint, model = load_model(*given, **options)
        loaded.append(weakref.ref(model))
        return checkpoint, model

    monkeypatch.setattr(runtime_reader, "load_model", noted)
    reader = RuntimeReader(tiny("llama"), tmp_path, EngineConfig(quiet=True))
    gc.disable()
    try:
        reader.final_hidden(TOKENS, Progress(False), "").close()
        assert [each() for each in loaded] == [None]
    finally:
        gc.enable()
