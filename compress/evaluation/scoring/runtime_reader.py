"""Reading text with a checkpoint as the runtime serves it, so that reported accuracy is that of the served model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ....runtime.decoder.model import Head, Model
from ....runtime.decoder.prompt_states import prompt_states
from ....runtime.engine.config import EngineConfig
from ....runtime.engine.engine import Engine
from ....runtime.engine.loading import load_head, load_model
from ....system.activation_store import ActivationStore
from ....system.device import device_named, give_back, on
from ....system.progress import Log, Progress


class RuntimeReader:
    """A checkpoint in its own dtype, on the runtime's kernels.

    The layers are in memory only while reading, so two models are never held at once.

    Args:
        path: the checkpoint.
        directory: where the last hidden states are kept.
        config: where and how it is computed.
    """

    def __init__(self, path: Path, directory: Path, config: EngineConfig) -> None:
        self._path, self._directory, self._config = path, directory, config
        self._device = config.device
        self._head: Head | None = None

    def final_hidden(self, tokens: Tensor, progress: Progress, description: str) -> ActivationStore:
        """The last hidden states for token ids ``[windows, length]``.

        Raises:
            RuntimeProblem: the runtime cannot run this checkpoint.
        """
        windows, length = tokens.shape
        with self._loaded(length, progress.say) as (model, states):
            store = ActivationStore((windows, length, model.width), model.dtype, self._directory)
            try:
                for batch in progress.track(list(store.batches()), description):
                    with on(model.device):
                        store.write(batch, states(tokens[batch].tolist()).cpu())
            except BaseException:
                store.close()
                raise
        return store

    def head(self) -> _WindowHead:
        """From hidden states ``[windows, length, width]`` to logits."""
        assert self._head is not None, "final_hidden comes first"
        return _WindowHead(self._head, device_named(self._device))

    @contextmanager
    def _loaded(self, length: int, log: Log) -> Iterator[tuple[Model, Callable[[list[list[int]]], Tensor]]]:
        """The model, and what computes the hidden states of windows; the head stays afterwards."""
        if self._config.ranks == 1:
            _, model = load_model(self._path, self._config, log=log)
            self._head = model.head
            try:
                yield model, lambda prompts: next(prompt_states(model, prompts))
            finally:
                del model
                give_back(device_named(self._device))
            return
        # Of a head that is divided, ranks would have to stay as long as it is used.
        self._head = load_head(self._path, self._config, log=log)
        engine = Engine(self._path, replace(self._config, max_length=length + 1, max_sequences=1))
        try:
            yield engine.model, engine.hidden_states
        finally:
            engine.close()


class _WindowHead:
    def __init__(self, head: Head, device: torch.device) -> None:
        self._head, self._device = head, device

    def __call__(self, hidden: Tensor) -> Tensor:
        with on(self._device):
            return self._head.logits(hidden.to(self._device).flatten(0, 1)).unflatten(0, hidden.shape[:2]).cpu()
