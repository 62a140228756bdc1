"""A compressed checkpoint as a transformers model on which adapters can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import GenerationConfig

from ...models.directory.find import find_checkpoint
from ...quant.activations import quantize_inputs
from ...quant.stored.compressed import CompressedModel, open_dense
from ...quant.stored.dense_weights import DenseWeights
from ...quant.training.frozen_linear import FrozenLinear
from ...system.errors import SmeltError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def for_training(
    checkpoint: str | Path,
    *,
    dtype: torch.dtype | None = None,
    round_inputs: bool = True,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a compressed checkpoint so that adapters can be trained on it, such as ``peft``'s LoRA.

    Its parameters are frozen. Quantized weights stay packed in memory and are dequantized for each pass, forwards and
    backwards. If the checkpoint quantizes activations, they are rounded, with straight-through gradients.
    Two things differ from serving: the adapters' inputs are not rounded, and neither is a quantized KV cache.

    Experts are separate, one linear for each projection. peft (0.21) expects them fused and skips them, so
    adapters can be trained on everything but experts.

    Args:
        checkpoint: a directory, a run's output directory or a hub name.
        dtype: the compute dtype; by default that of the checkpoint's original weights.
        round_inputs: whether activations are rounded as the checkpoint specifies.
        trust_remote_code: run Python code that comes with it.

    Raises:
        SmeltError: the checkpoint is not quantized, or in a format that Smelt does not read.

    Example:
        >>> model = peft.get_peft_model(for_training("runs/w4"), LoraConfig(target_modules="all-linear"))
        >>> ...  # train as any transformers model
        >>> model.save_pretrained("adapter")  # then: smelt merge runs/w4 --adapter adapter --output runs/w4-tuned
    """
    directory = find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code)
    if not directory.config_data().get("quantization_config"):
        raise SmeltError(f"{directory.path}: its weights are not quantized; load it with transformers")
    compressed = CompressedModel(open_dense(directory), directory)
    opened, weights = compressed.model, compressed.weights
    assert isinstance(weights, DenseWeights)
    dtype = dtype or opened.dtype
    model = cast("PreTrainedModel", opened.skeleton.model)
    frozen = {name: facts.key for name, facts in opened.linears.items() if facts.key in weights.packed}
    tensors = {
        name: weights.load(key).to(dtype) if weights.info(key).dtype.is_floating_point else weights.load(key)
        for name, key in opened.names.items()
        if name.removesuffix(".weight") not in frozen
    }
    for name, key in frozen.items():
        parts, scheme = weights.parts(key)
        shape = (opened.linears[name].rows, opened.linears[name].columns)
        model.set_submodule(name, FrozenLinear(parts, scheme, shape, tensors.get(f"{name}.bias"), dtype))
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if lost:
        raise SmeltError(f"{directory.path}: {lost[0]} has no weight in the checkpoint; download it again")
    if round_inputs:
        for name, rounding in compressed.input_roundings().items():
            quantize_inputs(model.get_submodule(name), rounding)
    _as_if_loaded(model, directory.path, dtype)
    return model.requires_grad_(False).eval()


def _as_if_loaded(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    """What ``from_pretrained`` sets besides weights."""
    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model.config.use_cache = said.get("use_cache", True)
    model.config.dtype = dtype
    model.config._name_or_path = model.name_or_path = str(path)
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
