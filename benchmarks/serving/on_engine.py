"""The first five claims, and swapping, on the real engine, with smelt-6m on this CPU, beside the simulator's prediction of the same runs.

    python -m benchmarks.serving.on_engine --calibration FILE [--only CLAIM …]

``FILE`` is what ``smelt bench --calibrate FILE`` writes. Nothing else may run meanwhile. Claims that are not run again keep their results.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smelt.models.directory.find import find_model
from smelt.models.text.text_source import TextSource
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.costs.calibration import Calibration
from smelt.runtime.costs.model_size import ModelSize, model_size
from smelt.runtime.costs.work import StepCost, StepWork
from smelt.runtime.engine.setup.host_blocks import HostBlocks
from smelt.runtime.measure.workload import random_prompt
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.results import SimulationResult
from smelt.runtime.simulate.simulation import simulate

from ..common import parser, save, saved
from .engine_run import EngineRun
from .memory import saved_by_sharing
from .setting import Row, Study, at_once, at_rate, running

NAME = "serving_on_engine"
MODEL = "builtin:smelt-6m"
_LONGEST = 1024
_PLACES = 8
_BLOCK = 16
_REPEATS = 5
_WHOLE = 4096


@dataclass(frozen=True)
class Way:
    """One side of a comparison.

    Attributes:
        name: for the table.
        options: of the engine, as both the real and the simulated one call them.
        block: positions in a block; the whole length where maxima are reserved.
    """

    name: str
    options: dict[str, Any]
    block: int = _BLOCK

    def engine(self) -> Engine:
        """The real engine, with memory for a few sequences of the maximum length."""
        model = find_model(MODEL)
        bytes_each = model_size(model).kv_bytes
        return Engine(
            model.path, block_size=self.block, max_model_len=_LONGEST, enable_prefix_caching=False, quiet=True,
            kv_cache_memory_bytes=int(_PLACES * _LONGEST * bytes_each), **self.options,
        )  # fmt: skip

    def simulated(self) -> SimulatedEngine:
        """The same on a virtual clock."""
        # An engine takes no more memory than its sequences can fill.
        places = min(_PLACES, self.options["max_num_seqs"])
        return SimulatedEngine(places * _LONGEST // self.block, block_size=self.block, **self.options)


@dataclass(frozen=True)
class EngineStudy:
    """What the simulator needs: the model's sizes and its step times; and how much is run."""

    size: ModelSize
    cost: StepCost
    repeats: int = _REPEATS
    share: float = 1.0

    @property
    def study(self) -> Study:
        """Where random requests come from."""
        return Study(Path(), self.share)


Claim = Callable[[EngineStudy], list[Row]]


def reserved(policy: str) -> Way:
    """Each sequence reserves the maximum length."""
    names = {"static": "static, reserved", "orca": "iteration-level, reserved"}
    options = {"policy": policy, "admission": "immediate", "max_num_seqs": _PLACES, "max_num_batched_tokens": _WHOLE}
    return Way(names[policy], options, _LONGEST)


def blocks(size: int) -> Way:
    """Blocks on demand, scheduled as Orca does."""
    return Way(f"blocks of {size}", {"policy": "orca", "max_num_seqs": 64, "max_num_batched_tokens": _WHOLE}, size)


def memory(given: EngineStudy) -> list[Row]:
    """vLLM: waste of the cache, and what paging gains."""
    rows = []
    for load, prompts, outputs in (
        ("half of ShareGPT's", "lognormal:80,1.1", "lognormal:169,0.9"),
        ("short", "lognormal:10,0.6", "lognormal:29,0.9"),
    ):
        arrivals = at_once(given.study.random(prompts, outputs, 200, longest=_LONGEST))
        ways = [reserved("static"), reserved("orca"), blocks(16), blocks(64)]
        rows += _rows(load, ways, arrivals, given)
    return rows


def iterations(given: EngineStudy) -> list[Row]:
    """Orca: sequences that end make room at once."""
    rows = []
    for outputs in ("fixed:64", "lognormal:64,0.5", "exponential:64", "lognormal:64,1.2"):
        arrivals = at_once(given.study.random("fixed:128", outputs, 200, longest=_LONGEST))
        rows += _rows(outputs, [reserved("static"), reserved("orca")], arrivals, given)
    return rows


def chunks(given: EngineStudy) -> list[Row]:
    """SARATHI and SplitFuse: decodes go on while prompts are computed. Saturated, then at three quarters of the first way's rate."""
    rows = []
    for load, prompts, outputs in (
        ("long prompts", "lognormal:500,0.4", "lognormal:60,0.8"),
        ("short prompts, long outputs", "lognormal:20,0.6", "lognormal:200,0.6"),
    ):
        arrivals = given.study.random(prompts, outputs, 40, rate=1.0, longest=_LONGEST)
        ways = [
            Way(f"{policy}, {budget:,}", {"policy": policy, "max_num_batched_tokens": budget, "max_num_seqs": 16})
            for policy, budget in (
                ("prefill_first", _WHOLE), ("orca", _WHOLE), ("fcfs", 64), ("fcfs", 128), ("sarathi", 128),
            )
        ]  # fmt: skip
        full = _rows(f"{load}, saturated", ways, at_once(arrivals), given)
        rate = 0.75 * len(arrivals) / full[0]["measured"]["seconds"]
        rows += full + _rows(f"{load}, 75% load", ways, at_rate(arrivals, rate), given)
    return rows


def feedback(given: EngineStudy) -> list[Row]:
    """FastServe: short outputs overtake long ones."""
    rows = []
    for load, prompts, outputs, busy in (
        ("heavy tails (pareto:60,1.2)", "lognormal:60,1", "pareto:60,1.2", 0.9),
        ("heavy tails (pareto:60,1.2)", "lognormal:60,1", "pareto:60,1.2", 1.3),
        ("equal outputs (fixed:60)", "lognormal:60,1", "fixed:60", 0.9),
        ("long prompts, equal outputs", "lognormal:400,0.5", "fixed:60", 0.5),
    ):
        arrivals = given.study.random(prompts, outputs, 150, rate=1.0, longest=_LONGEST)
        ways = [Way(policy, {"policy": policy, "max_num_seqs": 4}) for policy in ("fcfs", "mlfq")]
        found = EngineRun.of(ways[0].engine(), at_once(arrivals)).served
        capacity = 4 * len(found) / sum(each.ended - each.started for each in found)
        rows += _rows(f"{load}, {busy:.0%} load", ways, at_rate(arrivals, busy * capacity), given)
    return rows


def sharing(given: EngineStudy) -> list[Row]:
    """vLLM: the blocks that samples and beams of one prompt save, of an engine that serves one request at a time."""
    text = "\n\n".join(TextSource("builtin", half="evaluation").documents())
    rows = []
    for load, prompts, outputs in (
        ("half of ShareGPT's", "lognormal:80,1.1", "lognormal:169,0.9"),
        ("prompts of 350, outputs of 169", "lognormal:350,0.5", "lognormal:169,0.9"),
    ):
        arrivals = given.study.random(prompts, outputs, 60, longest=_LONGEST)
        engine = Way("sharing", {"max_num_seqs": 8}).engine()
        ids = engine.tokenizer(text)["input_ids"]
        asked: dict[str, dict[str, Any]] = {"4 samples": {"n": 4}, "4 beams": {"beam_width": 4}}
        for what, params in asked.items():
            used = apart = 0
            for number, arrival in enumerate(arrivals):
                start = 997 * number % (len(ids) - _LONGEST)
                engine.add_request(
                    ids[start : start + arrival.prompt],
                    SamplingParams(max_tokens=arrival.output, ignore_eos=True, seed=number, **params),
                )
                while engine.has_work:
                    engine.step()
                    cache = engine.cache
                    used += cache.blocks - cache.free
                    apart += sum(cache.needed(each.computed) for each in engine.scheduler.running)
            counted = (0.0,) if "n" in params else (0.1, 1.0)
            rows.append(
                {
                    "load": load, "way": what, "requests": len(arrivals), "measured": 1 - used / apart,
                    "predicted": [saved_by_sharing(arrivals, replaced) for replaced in counted],
                }
            )  # fmt: skip
    return rows


def swaps(given: EngineStudy) -> list[Row]:
    """Swapping or computing again: two copies of a sequence's blocks beside the step that computes its tokens."""
    rows = []
    for block in (4, 16, 64, 256):
        way = Way("swaps", {"max_num_seqs": 1, "max_num_batched_tokens": _LONGEST}, block)
        engine = way.engine()
        store = engine.model.keys_values(_LONGEST // block, block, engine.model.dtype)
        host = HostBlocks(store, _LONGEST // block)
        cost = host.measured_cost()
        for tokens in (8, 16, 32, 64, 128, 256, 512, 1000):
            blocks = -(-tokens // block)
            prompt = random_prompt(tokens, engine.model.spec.vocabulary, tokens)
            work = StepWork(
                tokens, 1, tokens, tokens * (tokens + 1) // 2, 0, 1, 1, tokens * (tokens + 1) // 2
            )  # fmt: skip
            rows.append(
                {
                    "block": block, "transfer_bytes": cost.transfer_bytes, "tokens": tokens,
                    "recompute": _median(partial(_computed, engine, prompt), given.repeats),
                    "swap": _median(partial(_copied, host, blocks), given.repeats),
                    "predicted_recompute": given.cost.seconds(work), "predicted_swap": 2 * cost.seconds(blocks),
                }
            )  # fmt: skip
    return rows


def _computed(engine: Engine, prompt: list[int]) -> None:
    engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
    while engine.has_work:
        engine.step()


def _copied(host: HostBlocks, blocks: int) -> None:
    pairs = [(i, i) for i in range(blocks)]
    host.swap(StepPlan([], swap_out=pairs))
    host.swap(StepPlan([], swap_in=pairs))


def _median(work: Callable[[], None], repeats: int) -> float:
    """In seconds, after one more run."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _rows(load: str, ways: Iterable[Way], arrivals: Sequence[Arrival], given: EngineStudy) -> list[Row]:
    """Each way's runs, by turns, and their prediction."""
    ways = list(ways)
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.repeats):
        for way in ways:
            found.setdefault(way.name, []).append(_figures(EngineRun.of(way.engine(), arrivals)))
    return [
        {
            "load": load, "way": way.name, "requests": len(arrivals),
            "measured": {name: statistics.median(each[name] for each in runs) for name in runs[0]},
            "least": {name: min(each[name] for each in runs) for name in runs[0]},
            "most": {name: max(each[name] for each in runs) for name in runs[0]},
            "predicted": _figures(simulate(arrivals, way.simulated(), given.cost)),
        }
        for way, runs in ((way, found[way.name]) for way in ways)
    ]  # fmt: skip


def _figures(result: SimulationResult) -> dict[str, float]:
    return {
        "seconds": result.seconds, "output_rate": result.output_rate, "waste": result.cache.waste, "running": running(result),
        "mean_first": result.first_token.mean, "p99_first": result.first_token.p99,
        "mean_completion": result.completion.mean, "p99_completion": result.completion.p99,
        "p99_between": result.between_tokens.p99, "p99_normalized": result.normalized.p99,
        "steps": float(result.steps), "preemptions": float(result.preemptions),
    }  # fmt: skip


CLAIMS: dict[str, Claim] = {
    "memory": memory,
    "sharing": sharing,
    "iterations": iterations,
    "chunks": chunks,
    "feedback": feedback,
    "swaps": swaps,
}


def main() -> int:
    """Run claims, and save their rows beside those that are there."""
    options = parser(__doc__)
    options.add_argument("--calibration", type=Path, required=True, help="what smelt bench --calibrate wrote here")
    options.add_argument("--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS), metavar="CLAIM")
    given = options.parse_args()
    size = model_size(find_model(MODEL))
    prediction = EngineStudy(size, Calibration.read(given.calibration).cost(size))
    known: dict[str, Any] = saved(NAME) or {}
    for name in given.only:
        began = time.perf_counter()
        known[name] = CLAIMS[name](prediction)
        print(f"{name}: {len(known[name])} rows in {time.perf_counter() - began:.0f} s", flush=True)
        command = "python -m benchmarks.serving.on_engine --calibration FILE"
        save(NAME, command, {each: known[each] for each in CLAIMS if each in known})
    return 0


if __name__ == "__main__":
    sys.exit(main())
