"""Reading text with a checkpoint as the runtime serves it, so that reported accuracy is that of the served model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ....runtime.decoder.model import Head
from ....runtime.decoder.prompt_states import prompt_states
from ....runtime.engine.engine import Engine
from ....runtime.engine.setup.config import EngineConfig
from ....runtime.engine.setup.loading import load_head, load_model
from ....system.errors import RuntimeProblem
from ....system.hardware.device import device_named, give_back, on
from ....system.progress import Log, Progress
from ....system.storage.activation_store import ActivationStore


class NotServed(RuntimeProblem):
    """The runtime cannot load a checkpoint; what else goes wrong while it is evaluated is no reason to evaluate it otherwise."""


@contextmanager
def not_served() -> Iterator[None]:
    """Problems within are those of loading a checkpoint."""
    try:
        yield
    except RuntimeProblem as problem:
        raise NotServed(str(problem)) from None


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
            NotServed: the runtime cannot load this checkpoint.
        """
        windows, length = tokens.shape
        with self._loaded(length, progress.say) as loaded:
            store = ActivationStore((windows, length, loaded.width), loaded.dtype, self._directory)
            try:
                for batch in progress.track(list(store.batches()), description):
                    store.write(batch, loaded.states(tokens[batch].tolist()).cpu())
            except BaseException:
                store.close()
                raise
        return store

    def head(self) -> _WindowHead:
        """From hidden states ``[windows, length, width]`` to logits."""
        assert self._head is not None, "final_hidden comes first"
        return _WindowHead(self._head, device_named(self._device))

    @contextmanager
    def _loaded(self, length: int, log: Log) -> Iterator[_Loaded]:
        """What computes windows; afterwards only the head stays."""
        with not_served():
            loaded = self._alone(log) if self._config.ranks == 1 else self._on_ranks(length, log)
        try:
            yield loaded
        finally:
            loaded.close()
            give_back(device_named(self._device))

    def _alone(self, log: Log) -> _Loaded:
        _, model = load_model(self._path, self._config, log=log)
        self._head = model.head

        def states(prompts: list[list[int]]) -> Tensor:
            with on(model.device):
                return next(prompt_states(model, prompts))

        return _Loaded(states, model.width, model.dtype)

    def _on_ranks(self, length: int, log: Log) -> _Loaded:
        # Of a head that is divided, ranks would have to stay as long as it is used.
        self._head = load_head(self._path, self._config, log=log)
        engine = Engine(self._path, replace(self._config, max_model_len=length + 1, max_num_seqs=1))
        return _Loaded(engine.hidden_states, engine.model.width, engine.model.dtype, engine.close)


@dataclass
class _Loaded:
    """A model that is loaded, without a name for it: whoever computes with it must not keep it.

    Attributes:
        states: hidden states of windows.
        width, dtype: of these.
    """

    states: Callable[[list[list[int]]], Tensor]
    width: int
    dtype: torch.dtype
    end: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Drop it."""
        self.end()
        self.states = self.end = None  # type: ignore[assignment]


class _WindowHead:
    def __init__(self, head: Head, device: torch.device) -> None:
        self._head, self._device = head, device

    def __call__(self, hidden: Tensor) -> Tensor:
        with on(self._device):
            return self._head.logits(hidden.to(self._device).flatten(0, 1)).unflatten(0, hidden.shape[:2]).cpu()
