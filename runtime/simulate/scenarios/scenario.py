"""What ``smelt simulate`` does: a load, a model, a device and policies in; results with intervals out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....system.errors import RuntimeProblem, nearest_name
from ....system.progress import Log
from ...costs.device_cost import DeviceCost, device_cost
from ...costs.model_size import ModelSize
from ...costs.swap_cost import SwapCost
from ...measure.this_machine import rates_of_this_machine
from ...requests.synthetic import LengthDistribution, synthetic
from ...requests.trace import Arrival, read_trace, repeated
from ...scheduling.policies.table import POLICIES
from ...scheduling.swapping import SWAP_MODES, SwapMode, TransferCost
from ..options import SimulatedEngine
from ..placements.placement import Change, Placement
from ..results import SimulationResult
from .intervals import FIGURES, PolicyResult, compare

_MOST = 10**9
_SYNTHETIC_REQUESTS = 1000
# Besides its bytes, each copy between host and device: a launch and a DMA's start.
_TRANSFER_SECONDS = 10e-6


@dataclass(frozen=True)
class SimulatedLoad:
    """The requests.

    Attributes:
        trace: a recorded one; None for random ones.
        prompts, outputs: distributions of random lengths.
        arrivals: random arrivals a second.
        requests: how many; None for the whole trace, or a thousand random ones.
        rate: scales the arrival rate.
        seed: of random ones.
    """

    trace: Path | None = None
    prompts: str | None = None
    outputs: str | None = None
    arrivals: float = 1.0
    requests: int | None = None
    rate: float = 1.0
    seed: int = 0

    def read(self, longest: int) -> tuple[list[Arrival], str]:
        """The requests that fit into ``longest`` tokens, and a sentence on those that do not, or nothing.

        Raises:
            RuntimeProblem: there is neither a trace nor lengths, or both, or one of them is wrong.
        """
        if (self.trace is None) != (self.prompts is not None and self.outputs is not None):
            raise RuntimeProblem("give either --trace, or both --prompts and --outputs")
        if self.trace is not None:
            if self.prompts is not None or self.outputs is not None:
                raise RuntimeProblem("give either --trace, or both --prompts and --outputs")
            found = read_trace(self.trace, self.requests or _MOST, longest)
            everything = read_trace(self.trace, _MOST, _MOST)
            # Up to the last one that is taken.
            longer = seen = 0
            for each in everything:
                if seen - longer == self.requests:
                    break
                seen += 1
                longer += each.prompt + each.output > longest
            left_out = f"{longer:,} of {seen:,} requests are longer than {longest:,} tokens" if longer else ""
            return repeated(found, self.requests or len(found), self.rate), left_out
        assert self.prompts is not None
        assert self.outputs is not None
        drawn = partial(
            synthetic,
            LengthDistribution.parse(self.prompts, "--prompts"),
            LengthDistribution.parse(self.outputs, "--outputs"),
            count=self.requests or _SYNTHETIC_REQUESTS,
            rate=self.arrivals * self.rate,
            seed=self.seed,
        )
        found = drawn(longest=longest)
        cut = sum(each.prompt + each.output > longest for each in drawn(longest=_MOST))
        return found, f"{cut:,} of {len(found):,} requests are cut to {longest:,} tokens" if cut else ""


@dataclass(frozen=True)
class Scenario:
    """Everything that is simulated; the engine's options are named as in :class:`EngineConfig`."""

    size: ModelSize
    device: str
    load: SimulatedLoad
    policies: Sequence[str] = ("fcfs",)
    placement: str = "single"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    memory_utilization: float = 0.9
    max_model_len: int | None = None
    host_memory_bytes: int = 0
    swap: str = "auto"
    transfer_bytes: int = 1_000_000


@dataclass(frozen=True)
class Simulated:
    """What was found.

    Attributes:
        device: its cost model.
        outside: what of the model and its load is outside the calibrated range.
        engine: the options of each engine.
        placement: as it was written.
        model: its sizes.
        left_out: which requests are not in it; empty if all are.
        compared: a result for each policy.
    """

    device: DeviceCost
    outside: list[str]
    engine: SimulatedEngine
    placement: str
    model: ModelSize
    left_out: str
    compared: list[PolicyResult]

    def as_data(self) -> dict[str, Any]:
        """As JSON."""
        engine = {name: value for name, value in asdict(self.engine).items() if name != "policy"}
        return {
            "model": {
                "name": self.model.name,
                "schemes": self.model.schemes,
                "kv_cache_dtype": self.model.kv_cache_dtype,
                "weight_bytes": self.model.weight_bytes,
                "kv_bytes_per_position": self.model.kv_bytes,
            },
            "device": {
                "name": self.device.name,
                "times": self.device.kind,
                "spread": self.device.spread,
                "outside_calibrated_range": self.outside,
            },
            "placement": self.placement,
            "left_out": self.left_out,
            "engine": engine,
            "policies": [each.as_data() for each in self.compared],
        }


def run(scenario: Scenario, log: Log = lambda _: None) -> Simulated:
    """Simulate a scenario.

    Raises:
        RuntimeProblem: an option is wrong, the model does not fit, or no request does.
    """
    for policy in scenario.policies:
        if policy not in POLICIES:
            raise RuntimeProblem(
                f"policy is {policy!r}; it must be {', '.join(POLICIES)}{nearest_name(policy, list(POLICIES))}"
            )
    if scenario.swap not in SWAP_MODES:
        raise RuntimeProblem(f"swap is {scenario.swap!r}; it must be {', '.join(SWAP_MODES)}")
    placement = Placement.parse(scenario.placement)
    size = scenario.size
    device = device_cost(scenario.device, measure=rates_of_this_machine(log))
    blocks = placement.blocks(size, device, scenario.memory_utilization, scenario.block_size)
    longest = min(scenario.max_model_len or size.max_length, blocks * scenario.block_size)
    arrivals, left_out = scenario.load.read(longest)
    # More blocks than all sequences can use would only take time to count.
    needed = scenario.max_num_seqs * -(-longest // scenario.block_size)
    engine = SimulatedEngine(
        min(blocks, needed),
        block_size=scenario.block_size,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        max_num_seqs=scenario.max_num_seqs,
        swap=_swap_mode(scenario.swap),
        **_host(scenario, device, placement.ways),
    )
    longest_here = max(arrival.prompt + arrival.output for arrival in arrivals)
    outside = device.outside(
        size, sequences=scenario.max_num_seqs, tokens=scenario.max_num_batched_tokens, context=longest_here
    )
    log(f"{len(arrivals):,} requests, {engine.blocks:,} cache blocks of {engine.block_size} positions")

    def simulated(some: Sequence[Arrival], options: SimulatedEngine, change: Change) -> SimulationResult:
        transfer = options.transfer
        with_copies = change if transfer is None else lambda cost: change(SwapCost(cost, transfer))
        return placement.simulate(some, options, size, device, with_copies)

    found = compare(arrivals, engine, scenario.policies, simulated, device.spread)
    return Simulated(device, outside, engine, str(placement), size, left_out, found)


def _swap_mode(text: str) -> SwapMode:
    return next(mode for mode in SWAP_MODES if mode == text)


def _host(scenario: Scenario, device: DeviceCost, ways: int) -> dict[str, Any]:
    if not scenario.host_memory_bytes:
        return {}
    block = int(scenario.size.kv_bytes * scenario.block_size)
    if scenario.host_memory_bytes < block:
        raise RuntimeProblem(f"--host-memory: less than a cache block of {block:,} bytes; give more or leave it out")
    rate = device.device.value("host_link") if device.device is not None else _copy_rate()
    # Devices that share a model copy their shares of a block at the same time.
    transfer = TransferCost(-(-block // ways), scenario.transfer_bytes, _TRANSFER_SECONDS, rate)
    return {"host_blocks": scenario.host_memory_bytes // block, "transfer": transfer}


def _copy_rate() -> float:
    """Bytes a second that this machine's memory copies."""
    from ...measure.machine_rates import read_rate

    return read_rate() / 2


def facts(found: Simulated) -> list[tuple[str, str]]:
    """What was simulated, and how far to trust it."""
    device = found.device
    if device.kind == "calibrated":
        trust = f"fitted to steps measured there; configurations left out of the fit were within {device.spread:.0%}"
    else:
        trust = f"PREDICTED from constants, never measured there; intervals assume an error of {device.spread:.0%}"
    model = found.model
    return [
        (
            "model",
            f"{model.name}, {', '.join(model.schemes)}, {model.weight_bytes / 1e9:.2f} GB, cache {model.kv_cache_dtype}",
        ),
        ("device", f"{device.name}, {found.placement}"),
        ("times", trust),
        *(("outside the calibrated range", each) for each in found.outside),
        *([("left out", found.left_out)] if found.left_out else []),
    ]


def rows(found: Simulated) -> list[tuple[str, list[str]]]:
    """Each figure's name, and its text for each policy, with intervals in brackets."""
    everything: list[tuple[str, list[str]]] = []
    for title, figure in (
        ("tokens/s", "output_rate"),
        *(
            (f"{title}, {share}", f"{name}_{share}")
            for title, name in (
                ("first token (TTFT)", "first_token"),
                ("between tokens (TBT)", "between_tokens"),
                ("completion", "completion"),
                ("completion per token", "normalized"),
            )
            for share in ("mean", "p50", "p99")
        ),
    ):
        plain = _rate if figure == "output_rate" else _plain
        texts = []
        for each in found.compared:
            low, high = each.intervals[figure]
            texts.append(f"{plain(FIGURES[figure](each.result))} ({plain(low)} to {plain(high)})")
        everything.append((title, texts))
    results = [each.result for each in found.compared]
    everything += [
        ("KV cache filled", [f"{each.cache.filled:.1%}" for each in results]),
        ("KV waste, to be filled later", [f"{each.cache.reserved:.2%}" for each in results]),
        ("KV waste, never filled", [f"{each.cache.wasted:.2%}" for each in results]),
        ("KV waste of what is held", [f"{each.cache.waste:.1%}" for each in results]),
        ("prompt tokens found in the prefix cache", [f"{each.cached_share:.1%}" for each in results]),
        ("preemptions", [f"{each.preemptions:,}" for each in results]),
        ("swaps, blocks moved", [f"{each.swaps:,}, {each.swapped_blocks:,}" for each in results]),
        ("time in steps", [f"{each.busy:.0%}" for each in results]),
    ]
    return everything


def table(found: Simulated) -> str:
    """The results for a terminal."""
    lines = [f"{name:<10} {text}" if len(name) < 10 else f"{name}: {text}" for name, text in facts(found)]
    named = [("", [each.result.policy for each in found.compared]), *rows(found)]
    first = max(len(name) for name, _ in named)
    widths = [max(len(texts[i]) for _, texts in named) for i in range(len(found.compared))]
    lines.append("")
    for name, texts in named:
        cells = "  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))
        lines.append(f"{name:<{first}}  {cells}")
    return "\n".join(lines)


def _plain(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f}"
