"""Speed of checkpoints, measured in turns so that drift of the machine affects all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime import EngineConfig
from ...system.hardware.device import device_named, free_memory
from ...system.progress import Progress
from ..results.result import Load, Speed, Spread, TimePart
from .settings import SpeedSettings
from .workers import Worker

if TYPE_CHECKING:
    from .scoring.on_server import RemoteModel, RemoteWorker

# A serving process needs its libraries, and weights may be kept wider than they are stored.
LIBRARIES = 700_000_000
WIDER = 2.5
_GRAPHS = 1.2  # on a GPU weights are kept as they are stored; graphs and contexts come on top
_SEED = 1000


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """A checkpoint to be measured: its name, path, and size of its files."""

    name: str
    path: Path
    bytes: int


@dataclass(frozen=True)
class MachineRates:
    """The machine's rates, measured in the same run as the models."""

    read: float
    operations: float
    dtype: str


@dataclass
class _Rounds:
    """Results of one model's repeats, by concurrency."""

    loads: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def spread(self, concurrency: int, value: Callable[[dict[str, Any]], float]) -> Spread:
        return spread([value(load) for load in self.loads[concurrency]])


def measure_speed(
    served: Sequence[MeasuredCheckpoint],
    settings: SpeedSettings,
    progress: Progress,
    *,
    servers: Sequence[RemoteModel],
    engine: EngineConfig,
) -> tuple[list[Speed], MachineRates | None]:
    """Measure the speed of checkpoints, and of models behind servers.

    Args:
        served: the checkpoints; measured in turns if all fit in memory at once, else one after another.
        settings: how.
        progress: shows progress.
        servers: take turns with the checkpoints if these take turns.
        engine: how they are served.

    Returns:
        Each one's speed, those of servers last, and the machine's rates unless there are servers only.

    Raises:
        SmeltError: a checkpoint cannot be served, or a server fails.
    """
    where = device_named(engine.device)
    on_cpu = where.type == "cpu"
    devices = _devices(engine.ranks, on_cpu=on_cpu)
    kept = WIDER if on_cpu else _GRAPHS
    needed = sum(kept * each.bytes + engine.ranks * LIBRARIES for each in served)
    together = len(served) < 2 or needed < devices * free_memory(where)
    groups: list[tuple[list[MeasuredCheckpoint], list[RemoteModel]]] = [(list(served), list(servers))]
    if not together:
        groups = [*(([each], []) for each in served), *([([], list(servers))] if servers else [])]
    options = asdict(settings.engine(engine))
    found: list[Speed] = []
    rates: MachineRates | None = None
    for group, remote in groups:
        with ExitStack() as running:
            workers, facts = [], []
            for each in group:
                progress.say(f"loading {each.name} to measure its speed")
                workers.append(running.enter_context(Worker(each.name)))
                facts.append(workers[-1].ask("load", checkpoint=str(each.path), options=options))
            clients = [running.enter_context(each.worker(max(1, *settings.concurrency))) for each in remote]
            measured = _machine_rates(facts[0]["dtype"], engine.device, progress) if facts else None
            rates = rates or measured
            rounds = _take_turns([*workers, *clients], settings, progress)
            for worker, fact, each in zip(workers, facts, rounds, strict=False):
                assert measured is not None
                found.append(_speed(worker, fact, each, settings, measured, engine.ranks, together, on_cpu=on_cpu))
            found += [_remote_speed(each, settings, together) for each in rounds[len(workers) :]]
    return found, rates


def _devices(ranks: int, *, on_cpu: bool) -> int:
    """Whose memory and rates count: a GPU's are of one, and on a CPU ranks share the machine's."""
    return 1 if on_cpu else ranks


def spread(values: list[float]) -> Spread:
    """Values with their median."""
    return Spread(median=statistics.median(values), values=values)


def _machine_rates(dtype: str, device: str, progress: Progress) -> MachineRates:
    """Measured in a separate process, so that its memory counts for no model."""
    progress.say("measuring the machine")
    with Worker("the machine") as worker:
        machine = worker.ask("machine", dtype=dtype, device=device)
    return MachineRates(machine["read"], machine["operations"], dtype)


def _take_turns(workers: Sequence[Worker | RemoteWorker], settings: SpeedSettings, progress: Progress) -> list[_Rounds]:
    rounds = [_Rounds() for _ in workers]
    # A single request is always measured: the other rates are compared with its rates.
    asked = sorted({1, *settings.concurrency})
    turns = [
        (repeat, concurrency, (first + repeat) % len(workers))
        for repeat in range(settings.repeats)
        for concurrency in asked
        for first in range(len(workers))
    ]
    for repeat, concurrency, which in progress.track(turns, "measuring speed, in turns"):
        load = workers[which].ask(
            "load_of",
            prompt=settings.prompt,
            generate=settings.generate,
            concurrency=concurrency,
            seed=_SEED * (repeat + 2) * (concurrency + 1),
        )
        rounds[which].loads.setdefault(concurrency, []).append(load)
    return rounds


def _remote_speed(rounds: _Rounds, settings: SpeedSettings, interleaved: bool) -> Speed:
    """What is seen of a server from outside."""
    first = rounds.spread(1, lambda load: load["first_token_p50"])
    return Speed(
        prompt=settings.prompt,
        generate=settings.generate,
        first_token=first,
        prefill_rate=rounds.spread(1, lambda load: load["prompt_tokens"] / load["first_token_p50"]),
        decode_rate=rounds.spread(1, lambda load: load["decode_rate"]),
        loads=[_load(rounds, concurrency) for concurrency in settings.concurrency],
        interleaved=interleaved,
        decode_time=[],
        prefill_time=[],
        kernels={},
    )


def _speed(
    worker: Worker,
    facts: dict[str, Any],
    rounds: _Rounds,
    settings: SpeedSettings,
    machine: MachineRates,
    ranks: int,
    interleaved: bool,
    *,
    on_cpu: bool,
) -> Speed:
    first = rounds.spread(1, lambda load: load["first_token_p50"])
    decode = rounds.spread(1, lambda load: load["decode_rate"])
    prefill = spread([settings.prompt / value for value in first.values])
    devices = _devices(ranks, on_cpu=on_cpu)
    decode_limit = devices * machine.read / facts["bytes_per_token"]
    operations = devices * machine.operations
    prefill_limit = operations / facts["operations_per_token"] if facts["dtype"] == machine.dtype else None
    time = worker.ask("time", prompt=settings.prompt, generate=settings.generate)
    return Speed(
        prompt=settings.prompt,
        generate=settings.generate,
        ranks=ranks,
        first_token=first,
        prefill_rate=prefill,
        decode_rate=decode,
        loads=[_load(rounds, concurrency) for concurrency in settings.concurrency],
        load_seconds=facts["seconds"],
        peak_memory_bytes=worker.ask("memory")["peak"] if ranks == 1 else None,  # of others it is not known
        interleaved=interleaved,
        decode_bytes_per_token=facts["bytes_per_token"],
        decode_limit=decode_limit,
        decode_of_limit=decode.median / decode_limit,
        prefill_limit=prefill_limit,
        prefill_of_limit=None if prefill_limit is None else prefill.median / prefill_limit,
        decode_time=[TimePart(name=name, seconds=seconds) for name, seconds in time["decode"].items()],
        prefill_time=[TimePart(name=name, seconds=seconds) for name, seconds in time["prefill"].items()],
        kernels=facts["kernels"],
    )


def _load(rounds: _Rounds, concurrency: int) -> Load:
    return Load(
        concurrency=concurrency,
        requests=concurrency,
        output_rate=rounds.spread(concurrency, lambda load: load["output_rate"]),
        first_token_p50=rounds.spread(concurrency, lambda load: load["first_token_p50"]),
        first_token_p99=rounds.spread(concurrency, lambda load: load["first_token_p99"]),
        between_tokens_p50=rounds.spread(concurrency, lambda load: load["between_tokens_p50"]),
        between_tokens_p99=rounds.spread(concurrency, lambda load: load["between_tokens_p99"]),
    )
