"""A Hugging Face directory as the runtime reads it, with weights in any supported format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...system.errors import RuntimeProblem, SmeltError
from ...system.hardware.pages import zeros_in_large_pages
from .cache_scheme import cache_args
from .cut_tensors import CutTensors
from .layout import Cut, Layout, PartLayout, StoredAxis
from .matrix import Matrix
from .stored import reader_of

# Embeddings by the names that they have in models without a head.
_EMBEDDINGS = ("embed_tokens.weight", "decoder.embed_tokens.weight", "wte.weight", "embed_in.weight")
_HEADS = ("lm_head", "embed_out")


def _of_whole_model(weights: CheckpointWeights, config: Any) -> CheckpointWeights:
    """Weights by the names that a causal LM gives them: some checkpoints, such as GPT-2's, were saved from the model without its head."""
    if not any(map(weights.has, _EMBEDDINGS)):
        return weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    prefix = getattr(known, "base_model_prefix", "")
    return weights.under(f"{prefix}.", _HEADS) if prefix else weights


class Checkpoint:
    """A directory with ``config.json`` and safetensors, checked; values are checked as they are read.

    Args:
        path: the directory.
        trust_remote_code: run the checkpoint's Python code for its config; off by default.

    Attributes:
        directory: the directory, for its tokenizer and end tokens.
        weights: its stored tensors.
        cache_args: how keys and values are rounded; None if they are not.

    Raises:
        SmeltError: it is damaged, or not a model that the runtime supports.
    """

    def __init__(self, path: str | Path, *, trust_remote_code: bool = False) -> None:
        self.path = Path(path).expanduser()
        self.directory = ModelDirectory(str(path), self.path, trust_remote_code)
        self.config, stored = self._read_config()
        self.directory.check_generation()
        self.weights = self._open_weights()
        self._rooms: dict[str, Tensor] = {}
        try:
            self._reader = reader_of(stored, self)
            self.cache_args = cache_args(stored)
        except SmeltError as error:
            raise RuntimeProblem(f"{self.path}/config.json: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RuntimeProblem(
                f"{self.path}/config.json: its quantization_config cannot be understood ({error!r}); quantize the model again"
            ) from None

    def _open_weights(self) -> CheckpointWeights:
        """Its tensors, by the names that a causal LM gives them."""
        return _of_whole_model(CheckpointWeights(self.path), self.config)

    def _read_config(self) -> tuple[Any, Any]:
        """The model's configuration, and its ``quantization_config``."""
        return self.directory.config(), self.directory.config_data().get("quantization_config")

    def check(self) -> None:
        """Check that it holds the tensors that its config requires, with their shapes, and no more layers.

        Raises:
            SmeltError: one line for each mismatch.
        """
        self.directory.check_weights(self.config, self.weights)

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        dtype = getattr(self.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def has(self, name: str) -> bool:
        """Whether a tensor is stored."""
        return self.weights.has(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            SmeltError: it is missing, or not finite.
        """
        if not self.weights.has(name):
            raise RuntimeProblem(f"{self.path}: the checkpoint lacks {name}")
        return self.weights.load(name, self._rooms.pop(name, None))

    def place_together(self, names: Sequence[str]) -> None:
        """Read the unquantized weights of some linears, the next time, into contiguous memory, so that they need no copy."""
        self._rooms.clear()
        tensors = [f"{name}.weight" for name in names]
        if len(tensors) < 2 or not all(map(self.has, tensors)):
            return
        first, *others = [self.weights.info(name) for name in tensors]
        alike = all((i.dtype, i.shape[1:]) == (first.dtype, first.shape[1:]) for i in others)
        if not alike or len(first.shape) != 2 or first.dtype.itemsize < 2:
            return
        counts = [info.shape[0] for info in (first, *others)]
        whole = zeros_in_large_pages((sum(counts), first.shape[1]), first.dtype)
        self._rooms = dict(zip(tensors, whole.split(counts), strict=True))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return self.weights.info(name).shape

    def layout(self, name: str, kind: str = "Linear", *, transposed: bool = False) -> Layout:
        """Where the outputs and inputs of linear ``name`` are in its tensors.

        Args:
            name: of the linear.
            kind: of the module.
            transposed: whether a plain weight is stored ``[inputs, outputs]``.
        """
        if not transposed:
            return self._reader.layout(name, kind, self.shape)
        columns, rows = self.shape(f"{name}.weight")
        return Layout(rows, columns, {"weight": PartLayout(StoredAxis(1), StoredAxis(0))})

    def matrix(self, name: str, kind: str = "Linear", cut: Cut | None = None, *, transposed: bool = False) -> Matrix:
        """The weight of linear ``name``, or of another kind of module, in the format it is stored in.

        Args:
            name: of the linear.
            kind: of the module.
            cut: the part to read; None for all of it.
            transposed: whether a plain weight is stored ``[inputs, outputs]``, as it then is returned.
        """
        reader = self._reader
        if cut is not None:
            reader = reader.reading(CutTensors(self, name, self.layout(name, kind, transposed=transposed), cut))
        try:
            found = reader.matrix(name, kind)
        except SmeltError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
            first = " ".join(str(error).split())[:200]
            raise RuntimeProblem(f"{self.path}: {name}: its tensors do not fit together ({first})") from None
        rows, columns = found.shape
        wide = None if found.scale is None else found.scale.shape
        for part in (found.scale, found.zero):
            unfit = part is not None and (part.dim() != 2 or part.shape[0] != rows or columns % max(part.shape[1], 1))
            # Kernels read a zero-point of each scale's group.
            if part is not None and (unfit or part.shape != wide):
                raise RuntimeProblem(
                    f"{self.path}: {name} has {rows} x {columns} codes and scales or zero-points of the shape"
                    f" {list(part.shape)}, which do not fit; quantize the model again"
                )
        return found

    def has_matrix(self, name: str) -> bool:
        """Whether linear ``name`` is stored, in any format."""
        return any(self.has(f"{name}.{kind}") for kind in ("weight", "weight_packed", "qweight"))

    def optional(self, name: str) -> Tensor | None:
        """A tensor, or None if it is not stored."""
        return self.tensor(name) if self.has(name) else None
