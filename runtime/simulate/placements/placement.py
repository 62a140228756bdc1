"""Placements by name: how many devices, how much cache each engine has, and how a trace is simulated on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....system.errors import RuntimeProblem
from ....system.hardware.machine import human_bytes
from ...costs.device_cost import DeviceCost
from ...costs.memory import usable_memory
from ...costs.model_size import ModelSize
from ...costs.work import StepCost
from ...requests.trace import Arrival
from ..options import SimulatedEngine
from ..results import SimulationResult
from ..simulation import simulate
from .disaggregated import simulate_disaggregated
from .pipeline import simulate_pipeline
from .replicas import simulate_replicas

FORMS = "single, replicas:N, tensor:N, pipeline:N, disaggregated:P+D or hybrid:P+D,LENGTH"
Change = Callable[[StepCost], StepCost]


@dataclass(frozen=True)
class Placement:
    """A layout of one model over devices.

    Attributes:
        kind: its name.
        counts: devices of each role.
        length: prompts of fewer tokens stay with the decode engines of a hybrid.
    """

    kind: str = "single"
    counts: tuple[int, ...] = (1,)
    length: int = 0

    @classmethod
    def parse(cls, text: str) -> Placement:
        """A placement from its text, such as ``disaggregated:1+3``.

        Raises:
            RuntimeProblem: it is none.
        """
        if text == "single":
            return cls()
        one = re.fullmatch(r"(replicas|tensor|pipeline):([1-9]\d{0,3})", text)
        if one:
            return cls(one[1], (int(one[2]),))
        two = re.fullmatch(r"(disaggregated|hybrid):([1-9]\d{0,3})\+([1-9]\d{0,3})(?:,([1-9]\d{0,6}))?", text)
        if two and (two[1] == "hybrid") == (two[4] is not None):
            return cls(two[1], (int(two[2]), int(two[3])), int(two[4] or 0))
        raise RuntimeProblem(f"placement is {text!r}; it must be {FORMS}")

    @property
    def devices(self) -> int:
        """How many."""
        return sum(self.counts)

    @property
    def ways(self) -> int:
        """Among how many devices a model's weights are divided."""
        return self.counts[0] if self.kind in ("tensor", "pipeline") else 1

    def blocks(self, size: ModelSize, device: DeviceCost, utilization: float, block_size: int) -> int:
        """The cache blocks of each engine that schedules: what weights and activations leave of its devices' memory.

        Raises:
            RuntimeProblem: nothing is left, or the model cannot be divided so.
        """
        kv_bytes = size.kv_bytes
        if self.kind == "tensor":
            try:
                kv_bytes *= size.cache_share(self.ways)
            except RuntimeProblem as problem:
                raise RuntimeProblem(f"placement {self}: {problem}") from None
        if self.kind == "pipeline" and self.ways > size.layers:
            raise RuntimeProblem(
                f"placement {self}: {size.name} has {size.layers} layers; choose at most as many stages"
            )
        memory = self.ways * usable_memory(device.memory_bytes, utilization)
        left = memory - size.weight_bytes
        if self.kind == "pipeline":
            left /= self.counts[0]  # each batch that is under way has its own
        blocks = int(left / (kv_bytes * block_size))
        if blocks < 1:
            raise RuntimeProblem(
                f"{size.name} needs {human_bytes(size.weight_bytes)} for weights alone, and {self.ways} x {device.name} has"
                f" {human_bytes(int(memory))} to use; choose more devices, a smaller scheme or a larger --memory-utilization"
            )
        return blocks

    def simulate(
        self,
        arrivals: Sequence[Arrival],
        engine: SimulatedEngine,
        size: ModelSize,
        device: DeviceCost,
        change: Change = lambda cost: cost,
    ) -> SimulationResult:
        """Serve a trace.

        Args:
            arrivals: in order of time.
            engine: the options of each engine.
            size: of the model.
            device: of each.
            change: of the cost model, for intervals.

        Raises:
            RuntimeProblem: a request does not fit, or a constant that is needed is not known.
        """
        if self.kind == "pipeline":
            stages = self.counts[0]
            costs = [change(device.cost(size, layers=1 / stages, head=i + 1 == stages)) for i in range(stages)]
            send = size.hidden * size.itemsize / _link(device) if stages > 1 else 0.0
            return simulate_pipeline(arrivals, engine, costs, send=send)[0]
        cost = change(device.cost(size, tensor_parallel=self.ways))
        if self.kind == "replicas":
            return simulate_replicas(arrivals, engine, cost, self.counts[0])
        if self.kind in ("disaggregated", "hybrid"):
            prefill, decode = self.counts
            return simulate_disaggregated(
                arrivals,
                engine,
                cost,
                prefill=prefill,
                decode=decode,
                send=size.kv_bytes / _link(device),
                shortest=self.length,
            )
        return simulate(arrivals, engine, cost)

    def __str__(self) -> str:
        counts = "+".join(map(str, self.counts))
        if self.kind == "single":
            return self.kind
        return f"{self.kind}:{counts}{f',{self.length}' if self.kind == 'hybrid' else ''}"


def _link(device: DeviceCost) -> float:
    """Bytes a second from one device to another: its link, or that to the host."""
    if device.device is None:
        raise RuntimeProblem(f"{device.name} was calibrated alone; give a device with constants to simulate several")
    for name in ("link", "host_link"):
        found = device.device.constants.get(name)
        if found is not None and found.value is not None:
            return found.value
    return device.device.value("link")
