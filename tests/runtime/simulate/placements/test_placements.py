"""Placements of several engines, against arithmetic and each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from smelt.runtime import RuntimeProblem
from smelt.runtime.costs.device_cost import device_cost
from smelt.runtime.costs.model_size import LinearSize, ModelSize
from smelt.runtime.costs.work import LinearCost, StepWork
from smelt.runtime.parallel.ranks import Ranks
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.placements.disaggregated import simulate_disaggregated
from smelt.runtime.simulate.placements.pipeline import (
    Lane,
    Pipeline,
    StepInPieces,
    equal_parts,
    simulate_pipeline,
)
from smelt.runtime.simulate.placements.placement import Placement
from smelt.runtime.simulate.placements.replicas import simulate_replicas
from smelt.runtime.simulate.replica import Replica
from smelt.runtime.simulate.results import Served
from smelt.runtime.simulate.simulation import simulate

from ..traffic import random_traffic

COST = LinearCost(step=1.0, token=0.01, cached=0.001)
OPTIONS = SimulatedEngine(blocks=400, max_num_batched_tokens=256, max_num_seqs=16)


def test_one_replica_is_one_engine() -> None:
    arrivals = random_traffic(80, 5.0)
    assert simulate_replicas(arrivals, OPTIONS, COST, 1).as_data() == simulate(arrivals, OPTIONS, COST).as_data()


def test_replicas_that_never_share_work_are_as_fast_as_one_alone() -> None:
    alone = simulate([Arrival(0.0, 50, 20)], OPTIONS, COST)
    both = simulate_replicas([Arrival(0.0, 50, 20), Arrival(0.0, 50, 20)], OPTIONS, COST, 2)
    assert both.completion.mean == pytest.approx(alone.completion.mean)
    assert both.output_rate == pytest.approx(2 * alone.output_rate)


def test_a_pipeline_of_one_stage_is_one_engine() -> None:
    arrivals = random_traffic(60, 5.0)
    found, bubbles = simulate_pipeline(arrivals, OPTIONS, [COST])
    alone = simulate(arrivals, OPTIONS, COST)
    assert bubbles == pytest.approx(0.0, abs=1e-9)
    assert found.completion.mean == pytest.approx(alone.completion.mean)
    assert found.first_token.p99 == pytest.approx(alone.first_token.p99)


def test_a_request_alone_passes_all_stages_one_after_another() -> None:
    """Four stages of a quarter each: no faster than one engine, and three quarters of the stages' time are bubbles."""
    stage = LinearCost(step=0.25, token=0.0025, cached=0.00025)
    arrivals = [Arrival(0.0, 100, 30)]
    found, bubbles = simulate_pipeline(arrivals, OPTIONS, [stage] * 4)
    assert found.completion.mean == pytest.approx(simulate(arrivals, OPTIONS, COST).completion.mean)
    assert bubbles == pytest.approx(0.75)


@dataclass(frozen=True)
class _BySize:
    """The time of a step is that of its tokens alone."""

    seconds_per_token: float

    def seconds(self, work: StepWork) -> float:
        return self.seconds_per_token * work.tokens


def test_full_batches_of_equal_chunks_leave_no_bubbles_between_them() -> None:
    """Two batches on two stages, each of the same size: after the first, both stages always work."""
    options = SimulatedEngine(blocks=400, max_num_batched_tokens=100, max_num_seqs=1)
    arrivals = [Arrival(0.0, 1000, 1), Arrival(0.0, 1000, 1)]
    found, bubbles = simulate_pipeline(arrivals, options, [_BySize(0.01)] * 2)
    # 20 chunks of a second at each stage; the second stage waits for the first chunk alone, the first stage for the last.
    assert found.seconds == pytest.approx(21.0)
    assert bubbles == pytest.approx(1 - 40 / 42)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("pieces", [1, 2, 5, 8])
def test_equal_pieces_of_a_step_leave_what_the_formula_says(stages: int, pieces: int) -> None:
    """(p - 1) / (m + p - 1), as GPipe has it."""
    cost = StepInPieces([_BySize(0.01)] * stages, lambda tokens: pieces)
    work = StepWork(tokens=400, sequences=1, cached=400, pairs=400)
    seconds, idle = cost.passed(equal_parts(work, pieces))
    assert idle == pytest.approx((stages - 1) / (pieces + stages - 1))
    assert seconds == pytest.approx(cost.seconds(work)) == pytest.approx(4.0 / pieces * (pieces + stages - 1))
    unequal = [replace(work, tokens=tokens) for tokens in (300, 100)]
    assert cost.passed(unequal)[0] == pytest.approx(4.0 + 3.0 * (stages - 1))
    parts = equal_parts(replace(work, tokens=401), pieces)
    assert sum(each.tokens for each in parts) == 401


def test_models_that_share_stages_wait_for_each_other() -> None:
    """AlpaServe's case: a burst of one model uses both devices, while the other model's requests do not come."""
    options = SimulatedEngine(blocks=400, max_num_seqs=1)
    burst = [(0, Arrival(0.0, 100, 1)) for _ in range(8)]
    dedicated = Pipeline([Lane(Replica(options), [_BySize(0.02)])])
    dedicated.serve(burst)
    halves = [_BySize(0.01)] * 2
    shared = Pipeline([Lane(Replica(options), halves, model) for model in (0, 1) for _ in range(2)])
    shared.serve(burst)

    def ended(pipeline: Pipeline) -> float:
        return max(each.ended for lane in pipeline.lanes for each in lane.engine.served)

    assert ended(dedicated) == pytest.approx(16.0)
    assert ended(shared) == pytest.approx(9.0)


def test_prompts_and_decodes_apart_take_what_arithmetic_says() -> None:
    """100 tokens elsewhere, then sent; the first token is the prompt's, the others are decoded without pauses."""
    found = simulate_disaggregated([Arrival(0.0, 100, 4)], OPTIONS, COST, prefill=1, decode=1, send=0.05)
    prompt = 1 + 1.0 + 0.1
    decodes = [1 + 0.01 + 0.001 * context for context in (101, 102, 103)]
    assert found.first_token.mean == pytest.approx(prompt)
    assert found.completion.mean == pytest.approx(prompt + 100 * 0.05 + sum(decodes))
    assert found.queue.mean == 0.0
    assert found.output_tokens == 4


def test_decodes_apart_are_not_interrupted_by_prompts() -> None:
    arrivals = random_traffic(100, 12.0, seed=3)
    prefill_first = SimulatedEngine(blocks=2000, max_num_batched_tokens=256, max_num_seqs=64, policy="prefill_first")
    together = simulate_replicas(arrivals, prefill_first, COST, 2)
    apart = simulate_disaggregated(arrivals, prefill_first, COST, prefill=1, decode=1, send=0.0)
    assert apart.requests == together.requests == 100
    assert apart.output_tokens == together.output_tokens
    assert apart.between_tokens.p99 < together.between_tokens.p99


def test_every_request_of_a_hybrid_is_served_once_under_its_number() -> None:
    arrivals = random_traffic(100, 4.0, seed=5)
    found = simulate_disaggregated(arrivals, OPTIONS, COST, prefill=1, decode=2, send=0.01, shortest=64)
    assert [each.number for each in found.served] == list(range(100))

    def shape(each: Served) -> tuple[float, int, int]:
        return each.at, each.prompt, each.output

    assert [shape(each) for each in found.served] == [(a.at, a.prompt, a.output) for a in arrivals]


@pytest.mark.parametrize(
    "text", ["single", "replicas:2", "tensor:4", "pipeline:3", "disaggregated:1+3", "hybrid:1+3,512"]
)
def test_placements_are_written_as_they_are_read(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("tensor:12", "8 key-value heads cannot be divided between 12"), ("pipeline:33", "has 32 layers; choose at most")],
)
def test_what_no_engine_could_do_is_said(text: str, sentence: str) -> None:
    linear = LinearSize(4096, 4096, 32, "bfloat16", 16, "16", 2 * 4096 * 4096, is_float=True)
    size = _size(linear)
    with pytest.raises(RuntimeProblem, match=sentence):
        Placement.parse(text).blocks(size, device_cost("h100-sxm"), 0.9, 16)


@pytest.mark.parametrize(("ways", "most"), [(2, 4), (3, 3), (8, 1), (16, 1)])
def test_heads_are_divided_as_the_engine_divides_them(ways: int, most: int) -> None:
    """Unevenly among three, and with a copy each for two of sixteen."""
    linear = LinearSize(64, 64, 1, "bfloat16", 16, "16", 2 * 64 * 64, is_float=True)
    ranks = Ranks()
    ranks.count = ways
    assert max(len(ranks.heads(32, 8, rank)[1]) for rank in range(ways)) == most
    device = device_cost("h100-sxm")
    single = Placement.parse("single").blocks(_size(linear), device, 0.9, 16)
    blocks = Placement.parse(f"tensor:{ways}").blocks(_size(linear), device, 0.9, 16)
    assert blocks == pytest.approx(single * 8 / most, rel=0.001)  # as many as the device with most heads has room for


def _size(linear: LinearSize) -> ModelSize:
    """Llama-3-8B's heads; some of its layers."""
    heads = ((32, 8),)
    return ModelSize(
        "llama", 32, 4096, 4096 * 32, 1000, (linear,), linear, 0, 2 * 1024 * 32, 8 * 32, "auto", 2, 8192, heads=heads
    )


@pytest.mark.parametrize("placement", [simulate_pipeline, simulate_disaggregated, simulate_replicas])
def test_placements_share_prefixes_as_one_engine_does(placement: Any) -> None:
    arrivals = [Arrival(100.0 * i, 1024, 4, (0, 1)) for i in range(10)]
    options = replace(OPTIONS, blocks=4000)
    if placement is simulate_pipeline:
        found = simulate_pipeline(arrivals, options, [COST])[0]
    elif placement is simulate_replicas:
        found = simulate_replicas(arrivals, options, COST, 1)
    else:
        found = simulate_disaggregated(arrivals, options, COST, prefill=1, decode=1, send=0.0)
    assert sorted(each.cached for each in found.served) == sorted(
        each.cached for each in simulate(arrivals, options, COST).served
    )
    assert any(each.cached for each in found.served)


@pytest.mark.parametrize(
    "text", ["", "tensor", "tensor:0", "disaggregated:2", "hybrid:1+1", "replicas:1+1", "pipeline:-1"]
)
def test_what_is_no_placement_is_said(text: str) -> None:
    with pytest.raises(RuntimeProblem, match="it must be single, replicas:N"):
        Placement.parse(text)
