"""Shared fixtures. Nothing here reaches the network."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

if not torch.cuda.is_available():
    # GPU kernels run in Triton's interpreter, which must be known before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

from smelt.compress import Recipe
from transformers.utils import logging as transformers_logging

from .compress.coded import Coded
from .runtime.kernels.patching import patch_once_a_launch
from .tiny import SHARED, make_model, save_model

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    patch_once_a_launch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test with many cases be among the quick ones with a few of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        count = each[0].get_closest_marker("few").args[0]  # type: ignore[union-attr]
        kept = {i * len(each) // count for i in range(count)}
        for number, item in enumerate(each):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all that was imported, a million objects, each time memory is given back."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _built() -> dict[str, tuple[Path, torch.Tensor]]:
    """Every tiny model of the session so far: its directory, and torch's random state after it was made."""
    return {}


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory, _built: dict[str, tuple[Path, torch.Tensor]]) -> Callable[..., Path]:
    """``tiny("llama", dtype=…)`` gives the directory of a tiny random model: a copy, which the test may change."""

    def build(architecture: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        key = repr((architecture, dtype, sorted(changes.items())))
        if key not in _built:
            kept = save_model(make_model(architecture, dtype, **changes), tmp_path_factory.mktemp("built") / "model")
            _built[key] = kept, torch.get_rng_state()
        kept, random_state = _built[key]
        torch.set_rng_state(random_state)  # what a test draws does not depend on which tests came before
        return shutil.copytree(kept, tmp_path_factory.mktemp(architecture) / "model")

    return build


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser of this machine."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(
        (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if p), None
    )
    if program is None:
        pytest.skip("needs chromium or chrome on PATH")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """``recipe(model, scheme="W4A16", …)`` makes a small recipe; dotted fields of the top level go in ``top``."""

    def build(model: Path | str, top: dict[str, Any] | None = None, **quantize: Any) -> Recipe:
        data = {
            "model": str(model),
            "output": str(tmp_path / "out"),
            "calibrate": {"samples": 8, "length": 32},
            "evaluate": {"windows": 4, "length": 32, "speed": False},
            "steps": [{"quantize": {"scheme": "W4A16", **quantize}}],
        }
        return Recipe.model_validate(data | (top or {}))

    return build


@pytest.fixture
def coded(tiny: Callable[..., Path]) -> Callable[..., Coded]:
    """``coded(bits=4, group=32, …)`` makes a small Llama of random codes."""

    def build(changed: dict[str, dict[str, Any]] | None = None, **usual: Any) -> Coded:
        path = tiny("llama", torch.float16, num_hidden_layers=2)
        return Coded(path, changed, **({"bits": 4, "group": 32, "symmetric": True} | usual))

    return build


@pytest.fixture
def shared() -> Path:
    """The folder of real models and texts beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared models and texts in {SHARED}, which are not part of the project")
    return SHARED
