"""The executor of a model: the one that its operators require."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....system.progress import Log
from ...decoder.model import Model
from ...decoder.parts.kv_cache import KeysValues
from ...decoder.parts.operators import ExecutorName
from ...speculation.drafter import Drafter
from ...speculation.model_drafter import ModelDrafter
from ..ranks.workers import Workers
from ..setup.config import EngineConfig
from ..setup.host_blocks import HostBlocks
from .executor import Executor
from .torch_executor import TorchExecutor


@dataclass(frozen=True)
class ExecutorParts:
    """What an executor is made from.

    Attributes:
        model: the model.
        store: its KV cache.
        ends: tokens that end a sequence.
        config: of the engine.
        host: the cache's blocks in host memory; None if there are none.
        max_model_len: the most tokens of a sequence.
        log: gets messages for the user.
        workers: the other ranks; None if there are none.
        drafter: proposes tokens; None for none.
    """

    model: Model
    store: KeysValues
    ends: frozenset[int]
    config: EngineConfig
    host: HostBlocks | None
    max_model_len: int
    log: Log
    workers: Workers | None = None
    drafter: Drafter | None = None

    @property
    def upper(self) -> Model | None:
        """The model of the upper bits, if it may answer requests: the configuration sees to it that what drafts then is that."""
        may_answer = self.config.upper_bits_at is not None
        return self.drafter.model if may_answer and isinstance(self.drafter, ModelDrafter) else None


def _torch_executor(parts: ExecutorParts) -> Executor:
    return TorchExecutor(
        parts.model,
        parts.store,
        parts.ends,
        parts.config.seed,
        parts.host,
        parts.workers,
        parts.drafter,
        parts.upper,
    )


def _gpu_executor(parts: ExecutorParts) -> Executor:
    from .gpu_executor import GpuExecutor

    model, config = parts.model, parts.config
    fusions = model.operators.fusions
    assert fusions is not None
    found = GpuExecutor(
        model,
        parts.store,
        parts.ends,
        config.seed,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=parts.max_model_len,
        graphs=fusions.graphs,
        host=parts.host,
        drafter=parts.drafter,
        upper=parts.upper,
    )
    if model.device.type == "cuda":
        found.warm_up(parts.log)
    return found


# Each creates an executor that is ready for steps.
EXECUTORS: Mapping[ExecutorName, Callable[[ExecutorParts], Executor]] = {
    "torch": _torch_executor,
    "gpu": _gpu_executor,
}
