"""Reading text with a checkpoint as the runtime serves it, so that reported accuracy is that of the served model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ....runtime.decoder.batch import Batch, Run
from ....runtime.decoder.model import Head
from ....runtime.engine.config import EngineConfig
from ....runtime.engine.loading import load_model
from ....system.activation_store import ActivationStore
from ....system.device import device_named, give_back, on
from ....system.progress import Progress

_BLOCK = 16


class RuntimeReader:
    """A checkpoint in its own dtype, on the runtime's kernels.

    The layers are in memory only while reading, so two models are never held at once.

    Args:
        path: the checkpoint.
        trust_remote_code: run the checkpoint's own Python for its config.
        directory: where the last layer's outputs are kept.
        device: where it is computed, as torch names it.
    """

    def __init__(self, path: Path, trust_remote_code: bool, directory: Path, device: str = "cpu") -> None:
        self._path, self._trust, self._directory, self._device = path, trust_remote_code, directory, device
        self._head: Head | None = None

    def final_hidden(self, tokens: Tensor, progress: Progress, description: str) -> ActivationStore:
        """The last layer's outputs for token ids ``[windows, length]``.

        Raises:
            RuntimeProblem: the runtime cannot run this checkpoint.
        """
        _, model = load_model(
            self._path, EngineConfig(trust_remote_code=self._trust, device=self._device), log=progress.say
        )
        self._head = model.head
        windows, length = tokens.shape
        store = ActivationStore((windows, length, model.spec.hidden), model.dtype, self._directory)
        cache = read = None
        try:
            batches = list(store.batches())
            most = max(batch.stop - batch.start for batch in batches)
            cache = model.keys_values(most * -(-length // _BLOCK), _BLOCK, model.dtype)
            for batch in progress.track(batches, description):
                with on(model.device):
                    read = model.hidden(_whole_windows(tokens[batch].tolist()), cache)
                store.write(batch, read.view(-1, length, model.spec.hidden).cpu())
        except BaseException:
            store.close()
            raise
        finally:
            del model, cache, read
            give_back(device_named(self._device))
        return store

    def head(self) -> _WindowHead:
        """From hidden states ``[windows, length, width]`` to logits."""
        assert self._head is not None, "final_hidden comes first"
        return _WindowHead(self._head, device_named(self._device))


class _WindowHead:
    def __init__(self, head: Head, device: torch.device) -> None:
        self._head, self._device = head, device

    def __call__(self, hidden: Tensor) -> Tensor:
        with on(self._device):
            return self._head(hidden.to(self._device).flatten(0, 1)).unflatten(0, hidden.shape[:2]).cpu()


def _whole_windows(windows: list[list[int]]) -> Batch:
    """Each window as a separate sequence, from position 0."""
    each = -(-len(windows[0]) // _BLOCK)
    runs = [
        Run(window, 0, list(range(i * each, (i + 1) * each)), len(window), wants=0) for i, window in enumerate(windows)
    ]
    return Batch(runs, _BLOCK)
