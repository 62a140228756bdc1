"""A step's time from a device's constants: predicted, never measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..devices.device import Device
from .model_size import LinearSize, ModelSize
from .work import StepWork

# The shares of a device's rates that good kernels reach, and what each step and each layer cost besides. These are assumptions:
# published H100 runs of gpt-fast, vLLM and TensorRT-LLM lie between 0.55 and 0.85 of bandwidth, and 0.4 to 0.75 of dense products.
BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.6
STEP_SECONDS = 0.3e-3
LAYER_SECONDS = 5e-6
# A collective among a few devices, besides its bytes.
COLLECTIVE_SECONDS = 10e-6
# Reads and writes of hidden states between the linears of a layer, in times the width.
_ACTIVATION_PASSES = 20


@dataclass(frozen=True)
class Shares:
    """What a device reaches of its constants.

    Attributes:
        bandwidth, compute: shares of its memory bandwidth and of its dense products.
        step, layer: seconds of each besides.
    """

    bandwidth: float = BANDWIDTH_SHARE
    compute: float = COMPUTE_SHARE
    step: float = STEP_SECONDS
    layer: float = LAYER_SECONDS


class RooflineCost:
    """The larger of the time of a step's bytes and of its products, part by part.

    Args:
        size: of the model.
        device: its constants.
        tensor_parallel: devices that share out every layer, joined by two all-reduces a layer.
        layers: the share of the layers that this device computes, for a stage of a pipeline.
        head: whether it computes the output head.
        shares: what it reaches of its constants.

    Raises:
        RuntimeProblem: a constant that is needed is not known.
    """

    def __init__(
        self,
        size: ModelSize,
        device: Device,
        *,
        tensor_parallel: int = 1,
        layers: float = 1.0,
        head: bool = True,
        shares: Shares | None = None,
    ) -> None:
        self._size = size
        self._share = layers / tensor_parallel
        self._layers = layers * size.layers
        self._ranks = tensor_parallel
        self._head_share = 1 / tensor_parallel if head else 0.0
        shares = shares or Shares()
        self._overhead = shares.step + shares.layer * self._layers
        self._bandwidth = shares.bandwidth * device.value("bandwidth")
        self._rates = {
            inputs: shares.compute * _products(device, inputs)
            for inputs in {"16", size.head.inputs, *(each.inputs for each in size.linears)}
        }
        self._link = device.value("link") if tensor_parallel > 1 else 0.0

    def seconds(self, work: StepWork) -> float:
        """The time of a step, without swapping."""
        size = self._size
        linears = self._of_linears(size.linears, work.tokens) * self._share
        head = self._of_linears((size.head,), work.sequences) * self._head_share if work.sequences else 0.0
        # A decode's query reads all its keys; queries of a prompt share them.
        seen = work.within(size.windows)
        reading = seen.cached * size.kv_bytes / self._bandwidth
        products = 4 * seen.pairs * size.attention_width / self._rates["16"]
        attention = max(reading, products) * self._share
        passing = work.tokens * size.hidden * size.itemsize * _ACTIVATION_PASSES / self._bandwidth * self._layers
        return self._overhead + linears + head + attention + passing / self._ranks + self._joining(work)

    def _of_linears(self, linears: Sequence[LinearSize], tokens: int) -> float:
        reading = sum(each.nbytes * each.count * each.read(tokens) for each in linears) / self._bandwidth
        products = sum(2 * each.numel * each.used * tokens / self._rates[each.inputs] for each in linears)
        return max(reading, products)

    def _joining(self, work: StepWork) -> float:
        """All-reduces of the hidden states, as a ring's."""
        if self._ranks == 1:
            return 0.0
        moved = 2 * (self._ranks - 1) / self._ranks * work.tokens * self._size.hidden * self._size.itemsize
        return 2 * self._layers * (COLLECTIVE_SECONDS + moved / self._link)


def _products(device: Device, inputs: str) -> float:
    """A device's rate of products for some inputs; those of 16 bits if it has none of its own for them."""
    names = {"16": ("flops_bf16", "flops_fp16"), "int8": ("flops_int8",), "fp8": ("flops_fp8",), "fp4": ("flops_fp4",)}
    for name in (*names.get(inputs, ()), "flops_bf16", "flops_fp16"):
        found = device.constants.get(name)
        if found is not None and found.value is not None:
            return found.value
    return device.value("flops_bf16")
