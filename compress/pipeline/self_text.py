"""Calibration text that the model writes itself, for when no text like its training data is at hand."""

from __future__ import annotations

from pathlib import Path

import torch

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_model
from ...models.directory.layer_sizes import LAYER_SIZES
from ...models.text.windows import Windows, fingerprint
from ...system.progress import Progress
from ...system.run_directory import digest
from ...system.tensor_files import SafetensorsFile, save_tensors
from ...system.versions import versions
from ..recipe.recipe import Recipe

_BATCH = 16


def written_once(recipe: Recipe, directory: Path, progress: Progress) -> Windows:
    """A recipe's self-written windows, kept in a directory for other recipes that ask for the same.

    Args:
        recipe: whose calibration is ``self``.
        directory: where they are kept.
        progress: shows how far writing is.
    """
    model = find_model(recipe.model, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code)
    settings = recipe.calibrate
    asked = [CheckpointWeights(model.path).fingerprint(), settings.samples, settings.length, recipe.seed, versions()]
    kept = directory / f"self-{digest(asked)[:24]}.safetensors"
    if kept.exists():
        tokens = SafetensorsFile(kept).load("tokens")
        return Windows(tokens, fingerprint(tokens))
    windows = self_written_windows(model, settings.samples, settings.length, recipe.seed, progress)
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(kept, {"tokens": windows.tokens})
    return windows


def self_written_windows(model: ModelDirectory, samples: int, length: int, seed: int, progress: Progress) -> Windows:
    """Let the model write ``samples`` windows of ``length`` tokens.

    Each begins with a random token; what follows is drawn from the model's own distribution
    (LLM-QAT, arXiv:2305.17888, found this the better choice over greedy text). The whole model is held in memory.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    arguments = {}
    if model.config_data().get(LAYER_SIZES):
        from ..integrations.transformers import config_for

        arguments = {"config": config_for(model.path, trust_remote_code=model.trust_remote_code)}
    lm = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, trust_remote_code=model.trust_remote_code, local_files_only=True, **arguments
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
        for begin in progress.track(range(0, samples, _BATCH), "generating calibration text"):
            written.append(
                lm.generate(  # type: ignore
                    starts[begin : begin + _BATCH],
                    attention_mask=torch.ones_like(starts[begin : begin + _BATCH]),
                    generation_config=plain,
                )
            )
    tokens = torch.cat(written)[:, :length]
    return Windows(tokens, fingerprint(tokens))
