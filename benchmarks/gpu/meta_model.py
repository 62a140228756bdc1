"""A model whose weights have shapes and no memory, packed and launched by the engine's own code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding
from smelt.runtime.decoder.model import Model
from smelt.runtime.engine.executors.gpu_executor import GpuExecutor
from smelt.runtime.engine.setup.config import EngineConfig
from smelt.runtime.engine.setup.parts import EngineParts
from smelt.runtime.gpu import linears
from smelt.runtime.gpu.operators import GpuOperators
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.base.targets import Target, target_of
from smelt.runtime.kernels.tiles import tile
from smelt.runtime.kernels.tiles.attention_tiles import TokenTile
from smelt.runtime.kernels.tiles.tile import LinearShape, Tile, Tiles
from smelt.runtime.weights.matrix import FloatCodes, Matrix
from torch import Tensor
from transformers import AutoConfig

from .random_checkpoints import GROUP, CheckpointSize

META = torch.device("meta")
_BLOCK = 16
# What linears and the head are stored as. The first four are those of random_checkpoints.py.
FORMATS = {
    "bf16": ("16", "16"),
    "w4a16": ("4", "16"),
    "w4a16 and an int8 head": ("4", "8"),
    "fp8": ("fp8", "16"),
    "w4a16 and an int4 head": ("4", "4"),
}
Changes = dict[str, dict[str, int]]


class MetaCheckpoint:
    """Stands in for a checkpoint: its tensors are on ``meta``.

    Args:
        size: of the model.
        stored: one of :data:`FORMATS`.

    Raises:
        KeyError: the format is not known.
    """

    cache_args = None
    path = Path("no checkpoint")
    dtype = torch.bfloat16

    def __init__(self, size: CheckpointSize, stored: str) -> None:
        self._bits, self._head = FORMATS[stored]
        self._shapes = _shapes(size)
        given = size.config()
        self.config: Any = AutoConfig.for_model(given.pop("model_type"), **given)

    def check(self) -> None:
        """There is nothing to see."""

    def place_together(self, names: Sequence[str]) -> None:
        """There is nothing to place."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shapes

    def has_matrix(self, name: str) -> bool:
        """Whether there is a weight of linear ``name``."""
        return self.has(f"{name}.weight")

    def tensor(self, name: str) -> Tensor:
        """One without memory."""
        return torch.empty(self._shapes[name], dtype=self.dtype, device=META)

    def optional(self, name: str) -> Tensor | None:
        """The same; None if there is none."""
        return self.tensor(name) if self.has(name) else None

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        """A weight as the checkpoint reader would give it."""
        rows, columns = self._shapes[f"{name}.weight"]
        bits = "16" if kind == "Embedding" else self._head if name == "lm_head" else self._bits
        if bits == "16":
            return Matrix.plain(self.tensor(f"{name}.weight"))
        if bits == "fp8":
            codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=META)
            scale = torch.empty(rows, 1, dtype=self.dtype, device=META)
            given = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
            inputs = ActivationRounding(QuantizationArgs(**given))
            return Matrix(codes, "float8", 8, scale=None, inputs=inputs, floats=FloatCodes(codes, scale))
        groups = columns // GROUP if bits == "4" else 1
        codes = torch.empty(rows, columns, dtype=torch.int8, device=META)
        scale = torch.empty(rows, groups, dtype=self.dtype, device=META)
        name = f"int{bits} g{GROUP}" if bits == "4" else f"int{bits}"
        return Matrix(codes, name, int(bits), scale=scale)


def _shapes(size: CheckpointSize) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    if not size.tied:
        found["lm_head.weight"] = (size.vocabulary, size.hidden)
    for i in range(size.layers):
        at = f"model.layers.{i}."
        for name, rows, columns in size.linears():
            found[f"{at}{name}.weight"] = (rows, columns)
        found |= {f"{at}{name}_layernorm.weight": (size.hidden,) for name in ("input", "post_attention")}
        if size.kind == "qwen3":
            found |= {f"{at}self_attn.{name}_norm.weight": (size.head,) for name in "qk"}
    return found


@dataclass(frozen=True)
class _ChangedTiles(Tiles):
    """Tiles of which some numbers are set by hand, to see what they would bring."""

    changes: Changes = field(default_factory=dict)

    def find(self, kernel: str, form: str, shape: LinearShape, block: int, row_tiles: int = 0) -> Tile:
        return replace(super().find(kernel, form, shape, block, row_tiles), **self.changes.get(kernel, {}))

    def of_tokens(self, heads: Heads, dtype: torch.dtype, kind: str) -> TokenTile:
        return replace(super().of_tokens(heads, dtype, kind), **self.changes.get("attend_tokens", {}))


class _MetaOperators(GpuOperators):
    """The GPU's operators with a target's shipped tiles."""

    def __init__(self, target: Target, changes: Changes) -> None:
        super().__init__(torch.bfloat16, META)
        self._tiles = _ChangedTiles(**vars(tile.tiles_of_target(target)), changes=changes)


def changes_of(texts: Sequence[str]) -> Changes:
    """``linear_codes:outputs=32,warps=2`` and the like.

    Raises:
        ValueError: one is not written so.
    """
    found: Changes = {}
    for text in texts:
        if not re.fullmatch(r"\w+:\w+=\d+(,\w+=\d+)*", text):
            raise ValueError(f"{text!r}: a tile is changed by KERNEL:NAME=NUMBER,NAME=NUMBER")
        kernel, _, rest = text.partition(":")
        found.setdefault(kernel, {}).update(
            (n, int(v)) for n, _, v in (each.partition("=") for each in rest.split(","))
        )
    return found


def model_on_meta(size: CheckpointSize, stored: str, target: Target, changes: Changes | None = None) -> Model:
    """A model of this size and format; call it inside :func:`meta_stands_for`.

    Args:
        size: of the model.
        stored: one of :data:`FORMATS`.
        target: the GPU.
        changes: of tiles, by kernel.
    """
    checkpoint: Any = MetaCheckpoint(size, stored)
    return Model(checkpoint, _MetaOperators(target, changes or {}))


def executor_on_meta(
    size: CheckpointSize,
    stored: str,
    target: Target,
    kept: torch.dtype,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    changes: Changes | None = None,
) -> GpuExecutor:
    """An engine's executor for such a model, which lays out steps as on a GPU; call it inside :func:`meta_stands_for`.

    Args:
        size, stored, target, changes: of the model.
        kept: what keys and values are kept as.
        max_num_seqs, max_num_batched_tokens, max_model_len: the limits of a step and of a sequence.
    """
    model = model_on_meta(size, stored, target, changes)
    blocks = max_num_seqs * -(-max_model_len // _BLOCK)
    store: Any = model.keys_values(blocks, _BLOCK, kept)
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return GpuExecutor(EngineParts(model, store, blocks, frozenset(), config, max_model_len))


@contextmanager
def meta_stands_for(target: Target) -> Iterator[None]:
    """Let ``meta`` stand for a GPU, whose values nobody asks for: Triton's interpreter has a few units only."""

    def there(device: torch.device) -> Target:
        return target if device.type == "meta" else target_of(device)

    with _replaced((target_of, there), (linears.is_two_of_four, lambda codes: False)):
        yield


@contextmanager
def tiles_are_of(device: str) -> Iterator[None]:
    """Let launches without a device have the tiles that are shipped for one, if there are such; those of its kind else.

    Args:
        device: as torch calls it.
    """
    path = tile.SHIPPED / tile.file_name(device)
    if not device or not path.exists():
        print(f"tiles of its kind{f': none are shipped for {device}' if device else ''}", flush=True)
        yield
        return
    with _replaced((tile.tiles_of_target, lambda target: tile.read(path, target))):
        yield


@contextmanager
def _replaced(*pairs: tuple[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Others in the place of some functions, wherever they are imported."""
    kept = [
        (module, name, original, other)
        for module in list(sys.modules.values())
        for original, other in pairs
        for name in (original.__name__,)
        if getattr(module, "__dict__", {}).get(name) is original
    ]
    for module, name, _, other in kept:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module, name, original, _ in kept:
            setattr(module, name, original)
