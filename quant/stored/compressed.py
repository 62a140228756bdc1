"""A compressed checkpoint as a dense model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...models.checkpoint.weights import CheckpointWeights, Weights
from ...models.directory.directory import ModelDirectory
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ..activations import ActivationRounding
from .config import StoredSchemes
from .dense_weights import DenseWeights
from .kv_cache import KVRounding
from .rounded import RoundedActivations


def open_dense(directory: ModelDirectory) -> OpenModel:
    """Open a model; a quantized one as the dense model that it represents, with weights restored as they are read.

    Raises:
        SmeltError: it holds no model that Smelt supports, or is quantized in an unsupported format.
    """
    quantization = directory.config_data().get("quantization_config")
    if not quantization:
        return OpenModel(directory)
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        raise SmeltError(
            f"{directory.path}: is quantized by {method}; start from a compressed-tensors checkpoint or the original model"
        )
    weights = DenseWeights(CheckpointWeights(directory.path), StoredSchemes(quantization).of)
    return OpenModel(replace(directory, as_dense=True), weights)


class CompressedModel:
    """A checkpoint that was made from a model.

    Args:
        original: the model it was made from, whose modules are used if the checkpoint is quantized.
        checkpoint: where the compressed weights are.

    Attributes:
        schemes: how its linears are stored; None if it is not quantized.
        weights: its tensors, restored.
        model: the dense model that it represents.
    """

    def __init__(self, original: OpenModel, checkpoint: ModelDirectory) -> None:
        config = checkpoint.config_data()
        self._stored = CheckpointWeights(checkpoint.path)
        self.schemes: StoredSchemes | None = None
        self.weights: Weights = self._stored
        if "quantization_config" not in config:
            self.model = OpenModel(checkpoint)
            return
        self.schemes = StoredSchemes(config["quantization_config"])
        self.weights = DenseWeights(self._stored, self.schemes.of)
        untied_head = original.is_tied and not config.get("tie_word_embeddings", True)
        self.model = OpenModel(original.directory, self.weights, untied_head=True) if untied_head else original

    @property
    def stored_bytes(self) -> int:
        """Bytes of its stored tensors."""
        return self._stored.nbytes

    def view(self, dtype: torch.dtype, spill: Path, *, round_expert_inputs: bool = True) -> StreamedModel:
        """Run it block by block, with weights restored and inputs rounded by its schemes.

        Args:
            dtype: the compute dtype.
            spill: a directory for activations that are too large for memory.
            round_expert_inputs: whether experts' inputs are rounded too. Servers do; transformers does not.
        """
        changes = RoundedActivations(self.input_roundings(of_experts=round_expert_inputs), self._keys_values())
        return StreamedModel(self.model.skeleton, self.weights, dtype, spill, changes)

    def input_roundings(self, *, of_experts: bool = True) -> dict[str, ActivationRounding]:
        """How inputs are rounded, by the names of the linears that read them."""
        rounded: dict[str, ActivationRounding] = {}
        if self.schemes is None or not isinstance(self.weights, DenseWeights):
            return rounded
        of_module: dict[str, list[str]] = {}
        for name in self._stored.names():
            of_module.setdefault(name.rpartition(".")[0], []).append(name)
        for facts in self.model.linears.values():
            if facts.key in self.weights.packed and (of_experts or not facts.is_expert):
                inputs = self.schemes.of(facts.key.removesuffix(".weight")).activations
                if inputs is not None:
                    prefix = facts.key.removesuffix("weight")
                    beside = {n.removeprefix(prefix): n for n in of_module[prefix.removesuffix(".")]}
                    parts = {local: self._stored.load(n) for local, n in beside.items() if local.startswith("input_")}
                    rounded[facts.name] = ActivationRounding.stored_as(inputs, parts)
        return rounded

    def _keys_values(self) -> dict[int, KVRounding]:
        args = None if self.schemes is None else self.schemes.keys_values
        if args is None:
            return {}
        found, names = {}, set(self._stored.names())
        for index in range(len(self.model.anatomy.blocks)):
            prefix = self.model.attention_prefix(index)
            kinds = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")
            parts = {kind: self._stored.load(prefix + kind) for kind in kinds if prefix + kind in names}
            found[index] = KVRounding.stored_as(args, parts)
        return found
