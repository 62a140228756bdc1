"""The engine's own tests, on the kernels: on a GPU if there is one, otherwise the slow ones in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine
from smelt.runtime.engine.executors.gpu_executor import GpuExecutor
from smelt.runtime.engine.setup import loading
from smelt.runtime.gpu import GpuOperators

from ..runtime.engine import test_engine, test_scoring, test_text
from ..runtime.engine.test_engine import small  # noqa: F401 - a fixture
from ..runtime.kernels.interpreter import DEVICE

if not torch.cuda.is_available():
    # Minutes each: a launch is thousands of times as slow there.
    pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SAME = {
    test_engine: (
        "test_greedy_tokens_are_those_of_generate",
        "test_stories_are_as_expected",
        "test_random_traffic_in_a_starved_cache",
        "test_beam_search_is_that_of_transformers",
        "test_beams_that_end_are_ranked_as_transformers_ranks_them",
        "test_beams_are_changed_and_stopped_as_transformers_does",
        "test_samples_depend_on_their_seed_alone",
        "test_log_probabilities_are_the_models_own",
        "test_streaming_gives_growing_text_and_leaving_early_frees_everything",
        "test_logits_that_are_not_numbers_end_only_their_request",
        "test_one_broken_beam_ends_its_request_and_no_other",
    ),
    test_scoring: (
        "test_scores_are_transformers",
        "test_prompt_logprobs_are_returned_once_when_a_prompt_is_computed_again",
        "test_a_model_whose_logits_are_not_numbers_is_reported",
    ),
    test_text: ("test_an_engine_stops_at_strings_and_not_before_min_tokens",),
}
for module, names in SAME.items():
    globals().update({name: getattr(module, name) for name in names})


# Of those that take minutes each in the interpreter.
TRIED = {
    "test_greedy_tokens_are_those_of_generate": ("llama", "gemma2", "gpt2"),
    "test_random_traffic_in_a_starved_cache": ("0-shared",),
}


def on_kernels(path: Path, **options: Any) -> Engine:
    """The engine that a test asks for, in blocks that kernels take, with room for as many positions."""
    usual = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 8, "quiet": True}
    asked = {**usual, **options, "block_size": 16, "device": DEVICE.type}
    if "kv_cache_memory_bytes" in options:
        # Tests that name a block's size have asked an engine how large one is, and it was this one.
        asked["kv_cache_memory_bytes"] = options["kv_cache_memory_bytes"] * options.get("block_size", 16) // 16
    found = Engine(path, **asked)
    assert isinstance(found.executor, GpuExecutor)
    return found


@pytest.fixture(autouse=True)
def _engines_are_on_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    name, _, case = request.node.name.partition("[")
    if DEVICE.type == "cpu" and case.rstrip("]") not in TRIED.get(name, (case.rstrip("]"),)):
        pytest.skip("takes minutes in the interpreter, where others like it are tried")
    monkeypatch.setattr(test_engine, "engine", on_kernels)
    monkeypatch.setattr(test_text, "engine", on_kernels)
    monkeypatch.setattr(test_scoring, "Engine", on_kernels)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(loading, "_operators", lambda dtype, *_, **__: GpuOperators(dtype, DEVICE))
