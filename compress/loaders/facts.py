"""The facts that decide whether a program loads a checkpoint: its configuration, and how each weight is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.steps.step import PreparedStep
from ...quant.scheme import Scheme
from ...quant.stored.config import StoredSchemes
from ...runtime.decoder.architectures import spec_of
from ...system.errors import RuntimeProblem


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear that is stored quantized.

    Attributes:
        name: its full name.
        rows, columns: its shape.
        scheme: how it is stored.
    """

    name: str
    rows: int
    columns: int
    scheme: Scheme

    @property
    def is_expert(self) -> bool:
        """Whether it is one of a mixture's."""
        return ".experts." in self.name


@dataclass(frozen=True)
class Facts:
    """A checkpoint, or one that a recipe would make.

    Attributes:
        config: its Hugging Face configuration.
        linears: its quantized linears; one that ``scheme: auto`` decides on is listed once per candidate.
        embedding: whether its input embedding is stored in codes.
        keys_values: the scheme of its KV cache; None if unquantized.
        not_in_gguf: why ``smelt export --to gguf`` would refuse it, one sentence each.
    """

    config: Any
    linears: tuple[QuantizedLinear, ...] = ()
    embedding: bool = False
    keys_values: QuantizationArgs | None = None
    not_in_gguf: tuple[str, ...] = ()


def facts_of_checkpoint(directory: ModelDirectory) -> Facts | None:
    """Facts of a model directory; None for one quantized in another format than compressed-tensors.

    Raises:
        SmeltError: it cannot be read.
    """
    config, data = replace(directory, as_dense=True).config(), directory.config_data().get("quantization_config")
    limits = _not_in_gguf(directory.path)
    if not data:
        return Facts(config, not_in_gguf=limits)
    if data.get("quant_method") != "compressed-tensors":
        return None
    schemes, weights = StoredSchemes(data), CheckpointWeights(directory.path)
    stored = set(weights.names())
    names = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    table = _embedding(config)
    linears = tuple(
        QuantizedLinear(name, *_shape(name, stored, weights), schemes.of(name)) for name in sorted(names - {table})
    )
    return Facts(config, linears, table in names, schemes.keys_values, limits)


def facts_of_plan(original: Path, last: PreparedStep) -> Facts:
    """Facts of the checkpoint that a recipe's last step would leave, as far as known before any work.

    Args:
        original: the model that the recipe starts from.
        last: the last step.
    """
    stored = last.stored
    if stored is None:
        return Facts(last.output.config, not_in_gguf=_not_in_gguf(original, last.output.config))
    model = stored.model
    linears = tuple(
        QuantizedLinear(name, model.linears[name].rows, model.linears[name].columns, scheme)
        for name, schemes in stored.schemes.items()
        for scheme in schemes
    )
    return Facts(model.config, linears, stored.embedding, stored.kv_cache, _not_in_gguf(original, model.config))


def _not_in_gguf(model: Path, config: Any = None) -> tuple[str, ...]:
    try:
        from ..export.gguf import gguf_limits  # imports the library of that name
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        return ("the package gguf, which the export needs, is not installed",)
    return tuple(gguf_limits(model, config))


def _embedding(config: Any) -> str | None:
    """The input embedding's name in the checkpoint, of an architecture that the runtime knows."""
    try:
        return spec_of(config).names.embedding
    except RuntimeProblem:
        return None


def _shape(name: str, stored: set[str], weights: CheckpointWeights) -> tuple[int, int]:
    if f"{name}.weight_shape" in stored:
        rows, columns = weights.load(f"{name}.weight_shape").tolist()
        return rows, columns
    if f"{name}.weight_packed" in stored:  # of four bits, two in a byte
        rows, half = weights.info(f"{name}.weight_packed").shape
        return rows, 2 * half
    rows, columns = weights.info(f"{name}.weight").shape
    return rows, columns
