"""Untying lm_head: a model whose output head shared the input embedding's weight gets a separate one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...system.storage.tensor_files import TensorInfo
from ..checkpoint.weights import ChangedWeights
from .open_model import OpenModel


def with_untied_head(model: OpenModel) -> OpenModel:
    """The same function; lm_head can now be changed without the embedding."""
    if not model.is_tied:
        return model
    return OpenModel(model.directory, _OwnHead(model), untied_head=True, is_edited=model.is_edited)


def untied(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with an untied lm_head."""
    changed = {**config, "tie_word_embeddings": False}
    for key, value in config.items():
        if isinstance(value, dict) and "tie_word_embeddings" in value:
            changed[key] = {**value, "tie_word_embeddings": False}
    return changed


class _OwnHead(ChangedWeights):
    """The tensors of a tied model, with the embedding's repeated under lm_head's name."""

    def __init__(self, model: OpenModel) -> None:
        super().__init__(model.weights)
        self._embedding = model.embedding_key
        self._head = f"{model.skeleton.head_name}.weight"

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._source.names(), self._head]))  # some checkpoints store a tied head, too

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._named(name))

    def load(self, name: str) -> Tensor:
        return self._source.load(self._named(name))

    def _named(self, name: str) -> str:
        return self._embedding if name == self._head else name
