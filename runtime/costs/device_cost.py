"""The cost model of a device by its name: fitted where it was calibrated, else predicted from constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...system.errors import RuntimeProblem
from ...system.hardware.machine import available_memory, cache_directory, processor_name
from ..devices.device import Constant, Device, load_device
from .calibration import Calibration
from .model_size import ModelSize
from .roofline import RooflineCost
from .work import StepCost, StepWork

# How far a prediction from constants may be off. An assumption: no device's was compared with measurements here.
ASSUMED_SPREAD = 0.3


@dataclass(frozen=True)
class DeviceCost:
    """What is known of a model's speed on a device.

    Attributes:
        name: the device's.
        kind: ``calibrated``: from steps that were measured there; ``predicted``: from its constants.
        memory_bytes: of the device.
        spread: how far times may be off, in relative terms.
        device: its constants; None if calibrated.
        calibration: None if predicted.
    """

    name: str
    kind: Literal["calibrated", "predicted"]
    memory_bytes: float
    spread: float
    device: Device | None = None
    calibration: Calibration | None = None

    def cost(self, size: ModelSize, *, tensor_parallel: int = 1, layers: float = 1.0, head: bool = True) -> StepCost:
        """A model's step times.

        Args:
            size: of the model.
            tensor_parallel: devices that share out every layer.
            layers: the share of the layers, for a stage of a pipeline.
            head: whether the output head is computed, too.

        Raises:
            RuntimeProblem: a constant that is needed is not known, or the device was calibrated alone.
        """
        if self.device is not None:
            return RooflineCost(size, self.device, tensor_parallel=tensor_parallel, layers=layers, head=head)
        assert self.calibration is not None
        if tensor_parallel > 1 or layers < 1:
            raise RuntimeProblem(
                f"{self.name} was calibrated alone; give a device with constants to simulate several that share a model"
            )
        return self.calibration.cost(size)

    def outside(self, size: ModelSize, *, sequences: int, tokens: int, context: int) -> list[str]:
        """Why a prediction is outside the calibrated range, as sentences; empty if it is inside."""
        if self.calibration is None:
            return []
        return self.calibration.outside(size, sequences=sequences, tokens=tokens, context=context)


class ScaledCost:
    """Another cost model's times, by a factor.

    Args:
        cost: the other one.
        factor: 2 doubles its times.
    """

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        return self._factor * self._cost.seconds(work)


def own_calibration() -> Path:
    """Where ``smelt bench --calibrate`` keeps the calibration of this machine with as many threads as are used now."""
    import torch

    name = "".join(letter if letter.isalnum() else "-" for letter in processor_name().lower())
    return cache_directory() / f"calibration-{name}-{torch.get_num_threads()}.json"


def device_cost(name: str, *, measure: Callable[[], tuple[float, float]] | None = None) -> DeviceCost:
    """A device by its name, its file, or ``cpu`` for this machine.

    Args:
        name: of a shipped device; the path of a YAML file with constants, or of a calibration (JSON); or ``cpu``.
        measure: measures this machine's memory bandwidth and products, for ``cpu`` where it is not calibrated.

    Raises:
        SmeltError: there is no such device, or its file is wrong.
    """
    if name == "cpu":
        path = own_calibration()
        if path.is_file():
            # Of a machine with the same processor, perhaps, which need not have the same memory.
            return replace(_calibrated(Calibration.read(path)), memory_bytes=float(available_memory()))
        if measure is None:
            raise RuntimeProblem("this machine is not calibrated; run smelt bench --calibrate FILE")
        return _predicted(_this_machine(*measure()))
    if name.endswith(".json"):
        return _calibrated(Calibration.read(Path(name)))
    return _predicted(load_device(name))


def _calibrated(found: Calibration) -> DeviceCost:
    return DeviceCost(found.device, "calibrated", found.memory_bytes, found.spread, calibration=found)


def _predicted(device: Device) -> DeviceCost:
    return DeviceCost(device.name, "predicted", device.value("memory_bytes"), ASSUMED_SPREAD, device=device)


def _this_machine(bandwidth: float, products: float) -> Device:
    import psutil

    source = "measured on this machine a moment ago"
    values = {
        "memory_bytes": float(psutil.virtual_memory().available),
        "bandwidth": bandwidth,
        "flops_bf16": products,
        "flops_fp16": products,
    }
    constants = {name: Constant(value, source, True) for name, value in values.items()}
    return Device(f"this machine ({processor_name()})", "cpu", constants)
