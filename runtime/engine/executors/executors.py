"""The executor of a model: the one that its operators require."""

from __future__ import annotations

from ...speculation.drafter import Drafter
from ..ranks.workers import Workers
from ..setup.parts import EngineParts
from .executor import Executor
from .torch_executor import TorchExecutor


def executor_of(parts: EngineParts, drafter: Drafter | None, workers: Workers | None) -> Executor:
    """An executor that is ready for steps.

    Args:
        parts: of the engine.
        drafter: proposes tokens; None for none.
        workers: the other ranks; None if there are none.
    """
    # Graphs are of one process, and of weights that stay where they are.
    if workers is not None or parts.model.offloads or parts.model.operators.executor == "torch":
        return TorchExecutor(parts, drafter, workers)
    from .gpu_executor import GpuExecutor

    found = GpuExecutor(parts, drafter)
    if parts.model.device.type == "cuda":
        found.warm_up(parts.log)
    return found
