"""The executor of a model: the one that its operators require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...system.progress import Log
from ..decoder.kv_cache import KeysValues
from ..decoder.model import Model
from ..decoder.operators import ExecutorName
from .config import EngineConfig
from .executor import Executor
from .host_blocks import HostBlocks
from .torch_executor import TorchExecutor


class BuildExecutor(Protocol):
    """Creates an executor."""

    def __call__(
        self,
        model: Model,
        store: KeysValues,
        ends: frozenset[int],
        config: EngineConfig,
        *,
        host: HostBlocks | None,
        max_length: int,
        log: Log,
    ) -> Executor:
        """An executor that is ready for steps.

        Args:
            model: the model.
            store: its KV cache.
            ends: tokens that end a sequence.
            config: of the engine.
            host: the cache's blocks in host memory; None if there are none.
            max_length: the most tokens of a sequence.
            log: gets messages for the user.
        """
        ...


def _torch_executor(
    model: Model,
    store: KeysValues,
    ends: frozenset[int],
    config: EngineConfig,
    *,
    host: HostBlocks | None,
    max_length: int,
    log: Log,
) -> Executor:
    return TorchExecutor(model, store, ends, config.seed, host)


def _gpu_executor(
    model: Model,
    store: KeysValues,
    ends: frozenset[int],
    config: EngineConfig,
    *,
    host: HostBlocks | None,
    max_length: int,
    log: Log,
) -> Executor:
    from .gpu_executor import GpuExecutor

    fusions = model.operators.fusions
    assert fusions is not None
    found = GpuExecutor(
        model,
        store,
        ends,
        config.seed,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget,
        max_length=max_length,
        graphs=fusions.graphs,
        host=host,
    )
    if model.device.type == "cuda":
        found.warm_up(log)
    return found


EXECUTORS: Mapping[ExecutorName, BuildExecutor] = {"torch": _torch_executor, "gpu": _gpu_executor}
