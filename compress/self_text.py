"""Calibration text that the model writes itself, for when no text like its training data is at hand."""

from __future__ import annotations

import torch

from .corpus import Windows, fingerprint
from .model_directory import ModelDirectory
from .progress import Progress

_BATCH = 16


def self_written_windows(model: ModelDirectory, samples: int, length: int, seed: int, progress: Progress) -> Windows:
    """Let the model write ``samples`` windows of ``length`` tokens.

    Each begins with a random token; what follows is drawn from the model's own distribution
    (LLM-QAT, arXiv:2305.17888, found this the better choice over greedy text). The whole model is held in memory.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    lm = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, trust_remote_code=model.trust_remote_code, local_files_only=True
    ).eval()
    vocabulary = lm.get_input_embeddings().weight.shape[0]  # type: ignore
    generator = torch.Generator().manual_seed(seed)
    plain = GenerationConfig(
        do_sample=True, top_k=0, min_new_tokens=length - 1, max_new_tokens=length - 1, pad_token_id=0
    )
    starts = torch.randint(0, vocabulary, (samples, 1), generator=generator)  # type: ignore
    written = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for begin in progress.track(range(0, samples, _BATCH), "writing calibration text"):
            written.append(
                lm.generate(  # type: ignore
                    starts[begin : begin + _BATCH],
                    attention_mask=torch.ones_like(starts[begin : begin + _BATCH]),
                    generation_config=plain,
                )
            )
    tokens = torch.cat(written)[:, :length]
    return Windows(tokens, fingerprint(tokens))
