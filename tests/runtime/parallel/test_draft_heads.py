"""A draft head on the first rank of a model that is divided: whole, beside states that all ranks have made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.runtime import Engine, SamplingParams
from transformers import AutoModelForCausalLM

from ..speculation.head_reference import ReferenceHead
from ..speculation.watched_head import WatchedHead

PROMPTS = [[1, 5, 9, 5, 9, 5, 9], [3, 4], [11], list(range(60, 5, -1))]
ENGINE: dict[str, Any] = {"quiet": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "block_size": 4}
WAYS: dict[str, dict[str, int]] = {
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2},
    "pp=3": {"pp": 3},
    "tp=2, pp=2": {"tp": 2, "pp": 2},
    "cp=2": {"cp": 2},
    "tp=2, cp=2": {"tp": 2, "cp": 2},
}
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.95, ignore_eos=True)


def _without_lm_head(head: ReferenceHead, directory: Path) -> None:
    """It uses the model's."""
    file = directory / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n not in ("lm_head.weight", "d2t", "t2d")}, file)
    head.lm_head.weight.data = head.model[0].get_output_embeddings().weight.data
    head.t2d.fill_(True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "architecture", "lacks"),  # llama's lm_head is its own, gemma's its embedding
    [
        ("tp=2", "llama", "nothing"),
        ("tp=2", "llama", "embedding and lm_head"),
        ("tp=2", "gemma3_text", "embedding and lm_head"),
        ("pp=2", "llama", "embedding and lm_head"),
        ("pp=2", "gemma3_text", "embedding and lm_head"),
        ("pp=3", "llama", "nothing"),
        ("tp=2, pp=2", "gemma3_text", "embedding"),
        ("cp=2", "llama", "embedding"),
        ("tp=2, cp=2", "gemma3_text", "embedding and lm_head"),
    ],
)
def test_logits_are_the_references_and_tokens_the_models(
    tiny: Callable[..., Path], way: str, architecture: str, lacks: str, tmp_path: Path
) -> None:
    model = tiny(architecture, torch.float32, num_hidden_layers=4)
    of = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = ReferenceHead(of, None if "lm_head" in lacks else 4090).eval()
    directory = head.save(tmp_path / "head", speculators=lacks == "nothing")
    if "lm_head" in lacks:
        _without_lm_head(head, directory)
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, SAMPLED)]
    host = {"host_cache_bytes": 1 << 20, "swap": "swap"}
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=4, **WAYS[way], **host, **ENGINE)) as two:
        watched = WatchedHead(two, PROMPTS, answers)
        for _ in range(2):  # prompts are cached the second time
            assert [output.outputs[0].token_ids for output in two.generate(PROMPTS, SAMPLED)] == answers
        assert two.drafting is not None
        assert two.drafting.total.all_accepted > 0
    assert watched.largest_error(head) < 1e-4
