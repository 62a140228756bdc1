"""What a model that does not fit into a device's memory does with its layers in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..costs.device_cost import DeviceCost
from ..costs.memory import usable_memory
from ..costs.model_size import ModelSize
from ..costs.work import StepCost
from .work import decode_work, prompt_work

_LARGEST = 1 << 20


@dataclass(frozen=True)
class OffloadFigures:
    """A model's figures with ``--offload cpu``, predicted from the device's link to the host.

    Attributes:
        read_bytes: of weights that are copied for each step.
        tokens_per_second: of one sequence alone.
        hiding_batch: the least sequences whose decode steps take as long as the copies; None if there are none, or their
            keys and values do not fit.
        hiding_tokens: the least tokens of a prompt whose step takes as long; None if there are none.
    """

    read_bytes: int
    tokens_per_second: float
    hiding_batch: int | None
    hiding_tokens: int | None

    def sentence(self) -> str:
        """For a plan's notes."""
        rate = f"{self.tokens_per_second:.2g}" if self.tokens_per_second < 10 else f"{self.tokens_per_second:.0f}"
        found = f"with --offload cpu {rate} tokens/s"
        hidden = [f"pieces of prompts of {self.hiding_tokens:,} tokens"] if self.hiding_tokens is not None else []
        if self.hiding_batch is not None:
            hidden.append(f"{self.hiding_batch:,} sequences")
        return f"{found}, copies hidden by {' or '.join(hidden)}" if hidden else found


def offload_figures(
    size: ModelSize, device: DeviceCost, cost: StepCost, *, context: int, batch: int, memory_bytes: float, devices: int
) -> OffloadFigures | None:
    """A model's figures; None if the device's link to the host is not known, or not even two layers and a sequence fit.

    Args:
        size: of the model.
        device: each of them.
        cost: of a step on all devices.
        context: tokens of a sequence.
        batch: sequences that are decoded together, for which there is a cache.
        memory_bytes: of all devices.
        devices: that share every layer.
    """
    link = None if device.device is None else device.device.constants.get("host_link")
    if link is None or link.value is None:
        return None
    layers = sum(each.nbytes * each.count for each in size.linears)
    elsewhere = size.weight_bytes - layers
    left = usable_memory(memory_bytes) - elsewhere - 2 * layers / size.layers
    cache = context * size.kv_bytes * size.cache_share(devices)
    # The engine gives the cache no more than half of it.
    cached = min(batch * cache, left / 2)
    if cached < cache:
        return None
    read = max(0.0, layers - (left - cached))
    seconds = read / (devices * link.value)
    hiding = _least(lambda count: cost.seconds(decode_work(count, context)), seconds)
    return OffloadFigures(
        int(read),
        1 / max(seconds, cost.seconds(decode_work(1, context))),
        hiding if hiding is not None and hiding * cache <= cached else None,
        _least(lambda count: cost.seconds(prompt_work(0, count, ends=True)), seconds),
    )


def _least(seconds: Callable[[int], float], wanted: float) -> int | None:
    """The least count that takes so long; more never take less."""
    low, high = 0, 1
    while seconds(high) < wanted:
        low, high = high, 2 * high
        if high > _LARGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return high
