"""What the claims share: models, loads, and how one engine is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt.runtime.costs.device_cost import DeviceCost, device_cost
from smelt.runtime.costs.model_size import LinearSize, ModelSize
from smelt.runtime.costs.work import StepCost
from smelt.runtime.requests.synthetic import LengthDistribution, synthetic
from smelt.runtime.requests.trace import Arrival, read_trace
from smelt.runtime.scheduling.swapping import TransferCost
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.placements.placement import Placement
from smelt.runtime.simulate.results import SimulationResult
from smelt.system.errors import SmeltError

Row = dict[str, Any]
# Positions of the KV cache that vLLM's paper has for OPT-13B on an A100 of 40 GB (Table 1): 12 GB at 800 KB each.
PAPER_POSITIONS = 15_700
MEMORY_SHARE = 0.9
# Besides its bytes, each copy between host and device, as in smelt simulate.
TRANSFER_SECONDS = 10e-6
_FEWEST = 12


def dense(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, longest: int
) -> ModelSize:
    """A Llama-like model in bfloat16, from its shape."""
    head_size, itemsize = hidden // heads, 2
    cached = kv_heads * head_size
    shapes = (
        (hidden, hidden, 2),  # queries and outputs
        (cached, hidden, 2),
        (intermediate, hidden, 2),
        (hidden, intermediate, 1),
    )
    linears = tuple(
        LinearSize(rows, columns, count * layers, "bfloat16", 16, "16", rows * columns * itemsize, True)
        for rows, columns, count in shapes
    )
    head = LinearSize(vocabulary, hidden, 1, "bfloat16", 16, "16", vocabulary * hidden * itemsize, True)
    other = (vocabulary + 2 * layers + 1) * hidden * itemsize
    return ModelSize(
        name, layers, hidden, layers * hidden, vocabulary, linears, head, other, 2 * layers * cached, layers * kv_heads,
        "auto", itemsize, longest, heads=((heads, kv_heads),),
    )  # fmt: skip


LLAMA_3_8B = dense("Llama-3-8B", 32, 4096, 14336, 32, 8, 128256, 131072)
LLAMA_13B = dense("Llama-13B", 40, 5120, 13824, 40, 40, 32000, 4096)
A100, H100 = "a100-sxm-80gb", "h100-sxm"


@dataclass(frozen=True)
class Study:
    """How much of the study is run.

    Attributes:
        traces: the folder of recorded traces.
        share: of the requests; tests take few.
    """

    traces: Path
    share: float = 1.0

    def count(self, requests: int) -> int:
        """So many requests, or the share of them."""
        return max(_FEWEST, round(requests * self.share))

    def random(
        self,
        prompts: str,
        outputs: str,
        requests: int,
        *,
        rate: float = 1e4,
        longest: int = 2048,
        burstiness: float = 1.0,
        seed: int = 0,
    ) -> list[Arrival]:
        """Random requests; without a rate they come as good as at once."""
        return synthetic(
            LengthDistribution.parse(prompts, "prompts"), LengthDistribution.parse(outputs, "outputs"), count=self.count(requests), rate=rate,
            longest=longest, burstiness=burstiness, seed=seed,
        )  # fmt: skip

    def azure(self, requests: int, longest: int = 16384) -> list[Arrival]:
        """Azure's conversations of 2023."""
        return read_trace(self.recorded("AzureLLMInferenceTrace_conv.csv"), self.count(requests), longest)

    def mooncake(self, requests: int, longest: int = 131072) -> list[Arrival]:
        """Mooncake's conversations, with the hashes of their prompts' blocks."""
        return read_trace(self.recorded("mooncake_conversation_trace.jsonl"), self.count(requests), longest)

    def recorded(self, name: str) -> Path:
        """A trace's file.

        Raises:
            SmeltError: it is missing.
        """
        path = self.traces / name
        if not path.is_file():
            raise SmeltError(f"{path} is missing; put the trace there, or give its folder as --traces")
        return path


def sharegpt(study: Study, requests: int, *, rate: float = 1e4) -> list[Arrival]:
    """Lengths with the means that vLLM's paper gives for ShareGPT (Figure 11): 161 and 338."""
    return study.random("lognormal:161,1.1", "lognormal:338,0.9", requests, rate=rate)


def alpaca(study: Study, requests: int) -> list[Arrival]:
    """The same for Alpaca: 19 and 58."""
    return study.random("lognormal:19.3,0.6", "lognormal:58.5,0.9", requests)


def at_once(arrivals: list[Arrival]) -> list[Arrival]:
    """The same requests, all there from the beginning: the engine is saturated."""
    return [replace(each, at=0.0) for each in arrivals]


def at_rate(arrivals: list[Arrival], rate: float) -> list[Arrival]:
    """The same requests with their pauses scaled so that so many come in a second."""
    factor = (len(arrivals) - 1) / arrivals[-1].at / rate
    return [replace(each, at=each.at * factor) for each in arrivals]


def device_of(name: str) -> DeviceCost:
    """A shipped device."""
    return device_cost(name)


def blocks_of(size: ModelSize, device: str, block_size: int = 16, placement: str = "single") -> int:
    """Cache blocks in what weights and activations leave."""
    return Placement.parse(placement).blocks(size, device_of(device), MEMORY_SHARE, block_size)


def cost_of(size: ModelSize, device: str, *, tensor_parallel: int = 1) -> StepCost:
    """Predicted step times."""
    return device_of(device).cost(size, tensor_parallel=tensor_parallel)


def paged(positions: int, block_size: int = 16, **options: Any) -> SimulatedEngine:
    """An engine with blocks on demand."""
    return SimulatedEngine(positions // block_size, block_size=block_size, **{"max_num_seqs": 256, **options})


def reserved(positions: int, longest: int, **options: Any) -> SimulatedEngine:
    """An engine that reserves the maximum length for each sequence: one block holds all of it."""
    places = positions // longest
    return SimulatedEngine(places, block_size=longest, admission="immediate", max_num_seqs=places, **options)


def running(result: SimulationResult) -> float:
    """Sequences that ran, on average over time."""
    return sum(each.ended - each.started for each in result.served) / result.seconds


def transfers(size: ModelSize, device: str, transfer_bytes: int, block_size: int = 16) -> TransferCost:
    """Copies between a device and host memory."""
    known = device_of(device).device
    assert known is not None
    block = int(size.kv_bytes * block_size)
    return TransferCost(block, transfer_bytes, TRANSFER_SECONDS, known.value("host_link"))


Claim = Callable[[Study], list[Row]]
