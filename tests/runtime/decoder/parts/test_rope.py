"""Rotations beside transformers' own, however far positions go and in whichever order they come."""

from __future__ import annotations

import pytest
import torch
from smelt.runtime.decoder.parts.rope import Rope, Rotations
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_beyond_what_was_asked_for_before(dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=16384)
    theirs, ours = LlamaRotaryEmbedding(config), Rotations({"all": Rope.of(config)}, dtype)
    for positions in ([0, 1, 2], [1023], [1024, 3], [16383, 700, 0]):
        expected = theirs(torch.zeros(1, dtype=dtype), torch.tensor([positions]))
        found = ours.of(torch.tensor(positions), [(len(positions), 16384)])["all"]
        for mine, whole in zip(found, expected, strict=True):
            assert torch.equal(mine.squeeze(1), whole[0, :, : mine.shape[-1]])
