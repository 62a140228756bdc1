"""A checkpoint of any shape and number format with random weights: speed does not depend on what weights mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.structure.anatomy import is_linear
from ...models.structure.skeleton import Skeleton
from ...quant.activations import ActivationRounding
from ...quant.grid import Grid
from ...quant.scheme import Scheme
from ...quant.stored.config import quantization_config
from ...quant.stored.quantized_weight import QuantizedWeight
from ...system.storage.tensor_files import TensorInfo

_DTYPE = torch.bfloat16
# Inputs are normed: few are larger.
_INPUT_RANGE = 8.0


def write_random_checkpoint(
    directory: Path, config: Any, scheme: Scheme | None = None, head: Scheme | None = None
) -> None:
    """Write a model directory in bfloat16, without a tokenizer.

    Args:
        directory: where; it must not exist.
        config: the model's Hugging Face configuration.
        scheme: how the blocks' linears are stored; None for unquantized.
        head: the same for the output head.

    Raises:
        SmeltError: the model cannot be built, or there is no room on the disk.
    """
    skeleton = Skeleton.build(config, _DTYPE)
    blocks = {f"{skeleton.blocks_name}.{name}" for name, each in skeleton.blocks.named_modules() if is_linear(each)}
    schemes = dict.fromkeys(blocks, scheme) if scheme is not None else {}
    if head is not None:
        schemes[skeleton.head_name] = head
    made: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    entries: list[Entry] = []
    for name, parameter in skeleton.parameters().items():
        linear, part = name.rpartition(".")[::2]
        chosen = schemes.get(linear) if part == "weight" else None
        if chosen is None:
            shape = tuple(parameter.shape)
            entries.append((name, TensorInfo(_DTYPE, shape), lambda name=name, shape=shape: _random(name, shape)))
            continue
        key = (*parameter.shape, chosen.label)
        if key not in made:  # alike linears share their codes; each has its own copy in memory
            weight = _random(name, tuple(parameter.shape))
            grid = Grid.fit(weight, chosen.args)
            made[key] = QuantizedWeight(grid.round(weight.float()), grid).stored(chosen) | _input_scales(chosen)
        for local, tensor in made[key].items():
            entries.append((f"{linear}.{local}", TensorInfo(tensor.dtype, tuple(tensor.shape)), _giving(tensor)))
    data = {**config.to_dict(), "architectures": [type(skeleton.model).__name__], "dtype": "bfloat16"}
    data.pop("torch_dtype", None)
    if schemes:
        ignored = [] if head is not None else [skeleton.head_name]
        named = {name: each for name, each in schemes.items() if each is not None}
        data["quantization_config"] = quantization_config(
            named, ignored, head=[skeleton.head_name] if head is not None else None
        )
    write_checkpoint(directory, directory.parent, data, entries)


def _input_scales(scheme: Scheme) -> dict[str, Tensor]:
    """The scales of inputs that a scheme fixes beforehand."""
    if scheme.activations is None or not scheme.reads_inputs:
        return {}
    low, high = torch.tensor(-_INPUT_RANGE), torch.tensor(_INPUT_RANGE)
    return ActivationRounding.observed(scheme.activations, low, high, _DTYPE).stored()


def _giving(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) < 2:
        return torch.zeros(shape, dtype=_DTYPE) if name.endswith("bias") else torch.ones(shape, dtype=_DTYPE)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(_DTYPE)
