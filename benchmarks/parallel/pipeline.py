"""How long a pipeline's stages wait, by how a step's tokens are cut into pieces, beside the simulator's prediction.

    python -m benchmarks.parallel.pipeline [--turns 5]

Two stages of a Llama of random bfloat16 weights (hidden 1,024, 16 blocks), each a process of one thread; steps one after another, as in the
engine. A stage works while it computes; what is left of a step's time it waits, or sends and receives. The prediction has the times of
single pieces on a stage alone, measured first, and no cost of sending.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from smelt.runtime.costs.work import LinearCost, StepWork
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parallel.pipeline import Result, equal_pieces, pieces_of, pipelined
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.engine.setup.loading import operators_for
from smelt.runtime.parallel.launch import joined_at, started
from smelt.runtime.parallel.ranks import ConnectedRanks
from smelt.runtime.parallel.stages import ConnectedStages, divided
from smelt.runtime.simulate.placements.pipeline import StepInPieces
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.system.processes.child_processes import ends_with

from ..common import parser, save
from ..random_model import build

_BLOCK = 16
_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)
Pieces = list[list[Run]]


class _Sequences:
    """Makes runs, each of a sequence of its own."""

    def __init__(self) -> None:
        self._next = 0

    def run(self, count: int, start: int = 0) -> Run:
        blocks = -(-(start + count) // _BLOCK)
        mine = list(range(self._next, self._next + blocks))
        self._next += blocks
        return Run([5 + i % 4000 for i in range(count)], start, mine, 1024, 1)


def loads() -> dict[str, tuple[list[Run], Pieces]]:
    """Steps, with their chunks as the scheduler has them: a prompt each, and all single tokens together."""
    new = _Sequences()
    single = [new.run(1, 100) for _ in range(32)]
    prompt, rest, several = new.run(512), new.run(480), [new.run(count) for count in (300, 120, 60, 32)]
    return {
        "32 single tokens": (single, [single]),
        "a prompt's 512": ([prompt], [[prompt]]),
        "32 single tokens and a prompt's 480": ([*single, rest], [single, [rest]]),
        "prompts of 300, 120, 60 and 32": (several, [[each] for each in several]),
    }


def ways(runs: list[Run], chunks: Pieces) -> dict[str, Pieces]:
    """How the tokens of a step can be cut."""
    return {
        "whole": [runs],
        "by chunk": chunks,
        "2 equal": equal_pieces(runs, 2),
        "engine's": pieces_of(Batch(runs, _BLOCK), 2),
        "8 equal": equal_pieces(runs, 8),
    }


class _Stage:
    """A stage of the model, and how long it has computed."""

    def __init__(self, ranks: ConnectedRanks, path: Path) -> None:
        torch.set_num_threads(1)
        place = divided(ranks, 1, 2)
        assert isinstance(place.stages, ConnectedStages)
        self.stages = place.stages
        operators = operators_for(torch.bfloat16, torch.device("cpu"), log=lambda _: None)
        self.model = Model(Checkpoint(path), operators, stages=place.stages)
        self.store = self.model.keys_values(600, _BLOCK, torch.bfloat16)
        self.dtype, self.device = self.model.dtype, self.model.device
        self.busy = 0.0

    def timed(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        begun = time.perf_counter()
        found = work()
        self.busy += time.perf_counter() - begun
        return found

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.timed(lambda: self.model.embed(tokens, positions))

    def through(self, hidden: torch.Tensor, batch: Batch, store: Any) -> torch.Tensor:
        return self.timed(lambda: self.model.through(hidden, batch, store))

    @torch.inference_mode()
    def step(self, pieces: Pieces) -> tuple[float, float]:
        """Seconds of a step, and for which this stage computed."""
        spec = self.model.spec
        result = Result(
            lambda hidden, batch: self.timed(lambda: self.model.logits(hidden, batch)),
            lambda piece: len(piece.wanted),
            spec.vocabulary,
            torch.float32,
        )
        self.busy, begun = 0.0, time.perf_counter()
        pipelined(self, self.stages, pieces, _BLOCK, self.store, spec.hidden, result)
        return time.perf_counter() - begun, self.busy

    @torch.inference_mode()
    def alone(self, run: Run) -> float:
        """Seconds of a piece on this stage."""
        piece, hidden = Batch([run], _BLOCK), torch.randn(len(run.tokens), self.model.spec.hidden).to(self.dtype)
        return min(_seconds(lambda: self.model.through(hidden.clone(), piece, self.store)) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def work(stage: _Stage, ranks: ConnectedRanks, turns: int) -> dict[str, Any]:
    """What every rank does; the first returns the results."""
    costs = []
    for rank in range(2):
        # One after another: the other stage waits.
        alone = [stage.alone(_Sequences().run(count)) for count in _SIZES] if ranks.rank == rank else []
        costs.append(_fitted(ranks.gather_data(alone)[rank]))
    rows = []
    for name, (runs, chunks) in loads().items():
        times: dict[str, list[tuple[float, float]]] = {}
        for _ in range(turns + 1):  # the first warms up
            for way, pieces in ways(runs, chunks).items():
                seconds, busy = stage.step(pieces)
                of_all = ranks.gather_data([seconds, busy])
                times.setdefault(way, []).append((of_all[0][0], sum(each for _, each in of_all)))
        for way, pieces in ways(runs, chunks).items():
            measured = times[way][1:]
            seconds, idle = StepInPieces(costs, lambda _: 1).passed([_work(piece) for piece in pieces])
            rows.append(
                {
                    "load": name, "way": way, "pieces": [sum(len(run.tokens) for run in piece) for piece in pieces],
                    "seconds": statistics.median(each for each, _ in measured),
                    "bubbles": statistics.median(1 - busy / (2 * each) for each, busy in measured),
                    "predicted_seconds": seconds, "predicted_bubbles": idle,
                }
            )  # fmt: skip
    return {"turns": turns, "stage_costs": [{"step": c.step, "token": c.token} for c in costs], "rows": rows}


def _work(piece: list[Run]) -> StepWork:
    return StepWork(sum(len(run.tokens) for run in piece), 0, 0, 0)


def _fitted(seconds: list[float]) -> LinearCost:
    """Least squares of relative errors."""
    scaled = torch.tensor([[1 / s, n / s] for n, s in zip(_SIZES, seconds, strict=True)], dtype=torch.float64)
    step, token = (
        torch.linalg.lstsq(scaled, torch.ones(len(_SIZES), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    return LinearCost(step=max(0.0, step), token=token)


def main() -> None:
    """Run it, or be the other stage."""
    if len(sys.argv) > 1 and sys.argv[1].isdecimal():
        parent, place, rank, count, device = sys.argv[1:]
        ends_with(int(parent))
        ranks = joined_at(Path(place), int(rank), int(count), device)
        path, turns = ranks.broadcast_data(None)
        work(_Stage(ranks, Path(path)), ranks, turns)
        return
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=7)
    turns = options.parse_args().turns
    with tempfile.TemporaryDirectory(prefix="smelt-pipeline-") as scratch:
        path = Path(scratch) / "model"
        build(path, 16)
        ranks, others = started("benchmarks.parallel.pipeline", 2, "cpu")
        try:
            ranks.broadcast_data([str(path), turns])
            found = work(_Stage(ranks, path), ranks, turns)
        finally:
            others.end()
    print(json.dumps(found, indent=1))
    print(save("pipeline", f"python -m benchmarks.parallel.pipeline --turns {turns}", found))


if __name__ == "__main__":
    main()
