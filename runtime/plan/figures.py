"""What a model does on a device: the memory that it needs, the sequences that fit, speed, and energy."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.device_cost import DeviceCost
from ..costs.memory import usable_memory
from ..costs.model_size import ModelSize
from .offload_figures import OffloadFigures, offload_figures
from .work import decode_work, first_token_seconds

_BLOCK = 16


@dataclass(frozen=True)
class PlanLoad:
    """What a model is to serve.

    Attributes:
        context: tokens of a sequence.
        batch: sequences that are decoded together.
        max_num_batched_tokens: tokens of a prompt that a step computes.
        devices: that share every layer.
        memory_bytes: of all devices.
    """

    context: int
    batch: int
    max_num_batched_tokens: int
    devices: int
    memory_bytes: float


@dataclass(frozen=True)
class Figures:
    """A model's figures. Times are in seconds; each sequence has all of the load's context.

    Attributes:
        weight_bytes: of the weights as the engine keeps them.
        cache_bytes: of a sequence's keys and values.
        memory_bytes: what devices must have for weights, activations and one sequence.
        fits: whether they have it.
        sequences: how many fit.
        tokens_per_second: of one sequence alone.
        throughput: tokens a second of the load's batch; None if it does not fit.
        first_token: from the prompt to its first token (TTFT), computed in chunks of the token budget.
        first_token_in_one_step: the same, computed in one step.
        joules: of a generated token, at most, of the batch or of one sequence if it does not fit; None if the power is not known.
        offload: what it does with layers in host memory, if it does not fit and that is known.
    """

    weight_bytes: int
    cache_bytes: float
    memory_bytes: float
    fits: bool
    sequences: int
    tokens_per_second: float
    throughput: float | None
    first_token: float
    first_token_in_one_step: float
    joules: float | None
    offload: OffloadFigures | None = None


def figures(size: ModelSize, device: DeviceCost, load: PlanLoad) -> Figures:
    """A model's figures on a device.

    Args:
        size: of the model, as it is served.
        device: each of them.
        load: what it serves.

    Raises:
        RuntimeProblem: a constant that is needed is not known, or the device was calibrated alone.
    """
    cost = device.cost(size, tensor_parallel=load.devices)
    cache = -(-load.context // _BLOCK) * _BLOCK * size.kv_bytes * size.cache_share(load.devices)
    left = usable_memory(load.memory_bytes) - size.weight_bytes
    sequences = max(0, int(left / cache))
    one = cost.seconds(decode_work(1, load.context))
    batch = cost.seconds(decode_work(load.batch, load.context)) if load.batch <= sequences else None
    power = device.device.constants.get("power_watts") if device.device is not None else None
    joules = None
    if power is not None and power.value is not None:
        joules = load.devices * power.value * (one if batch is None else batch / load.batch)
    return Figures(
        size.weight_bytes,
        cache,
        (size.weight_bytes + cache) / usable_memory(1.0),
        sequences >= 1,
        sequences,
        1 / one,
        None if batch is None else load.batch / batch,
        first_token_seconds(cost, load.context, load.max_num_batched_tokens),
        first_token_seconds(cost, load.context, load.context),
        joules,
        None
        if sequences
        else offload_figures(
            size,
            device,
            cost,
            context=load.context,
            batch=load.batch,
            memory_bytes=load.memory_bytes,
            devices=load.devices,
        ),
    )
