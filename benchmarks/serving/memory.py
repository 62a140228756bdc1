"""Waste of the KV cache, what paging gains, and what samples and beams share."""

from __future__ import annotations

import random

from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.costs.model_size import ModelSize
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.simulation import simulate

from .setting import (
    A100,
    LLAMA_3_8B,
    LLAMA_13B,
    PAPER_POSITIONS,
    Row,
    Study,
    alpaca,
    at_once,
    blocks_of,
    cost_of,
    paged,
    reserved,
    running,
    sharegpt,
)

_SAMPLES = 4
_BLOCK = 16


def waste(study: Study) -> list[Row]:
    """vLLM: less than 4% of the KV cache is wasted."""
    azure_positions = 16 * blocks_of(LLAMA_3_8B, A100)
    loads: list[tuple[str, list[Arrival], ModelSize, int, int]] = [
        ("ShareGPT-like", sharegpt(study, 600), LLAMA_13B, PAPER_POSITIONS, 2048),
        ("Alpaca-like", alpaca(study, 1500), LLAMA_13B, PAPER_POSITIONS, 2048),
        ("Azure conversations", at_once(study.azure(1500)), LLAMA_3_8B, azure_positions, 16384),
    ]
    rows = []
    for load, arrivals, size, positions, longest in loads:
        cost = cost_of(size, A100)
        ways: list[tuple[str, int, SimulatedEngine]] = [
            ("static, reserved", longest, reserved(positions, longest, policy="static", max_num_batched_tokens=8192)),
            (
                "iteration-level, reserved",
                longest,
                reserved(positions, longest, policy="orca", max_num_batched_tokens=8192),
            ),
        ]
        ways += [("blocks", block, paged(positions, block, max_tokens=None)) for block in (1, 16, 32, 64, 128, 256)]
        for way, block, engine in ways:
            found = simulate(arrivals, engine, cost)
            cited = _CITED.get((load, way, block), "")
            rows.append(
                {
                    "load": load, "way": way, "block": block, "requests": len(arrivals), "paper": cited,
                    "waste": found.cache.waste, "later": found.cache.reserved, "never": found.cache.wasted,
                    "filled": found.cache.filled, "running": running(found), "output_rate": found.output_rate,
                    "preemptions": found.preemptions,
                }
            )  # fmt: skip
    return rows


# Figure 2 of Kwon et al. (SOSP 2023): the share of the cache that holds tokens' keys and values.
_CITED = {
    ("ShareGPT-like", "iteration-level, reserved", 2048): "79.6%",
    ("ShareGPT-like", "blocks", 16): "3.7%",
}


def paging(study: Study) -> list[Row]:
    """vLLM: blocks on demand against reserved maxima, both scheduled by iteration, in equal memory."""
    big = 16 * blocks_of(LLAMA_3_8B, A100)
    loads: list[tuple[str, list[Arrival], ModelSize, int, int, int, str]] = [
        ("ShareGPT-like", sharegpt(study, 600), LLAMA_13B, PAPER_POSITIONS, 2048, 256, "2.7x to 8x"),
        ("Alpaca-like", alpaca(study, 1500), LLAMA_13B, PAPER_POSITIONS, 2048, 256, ""),
        ("Azure conversations", at_once(study.azure(1500)), LLAMA_3_8B, big, 16384, 256, ""),
        (
            "all of the maximum length",
            study.random("fixed:1024", "fixed:1024", 200),
            LLAMA_13B, PAPER_POSITIONS, 2048, 256, "",
        ),
        ("ShareGPT-like, memory for 7 places, 7 places", sharegpt(study, 600), LLAMA_13B, PAPER_POSITIONS, 2048, 7, ""),
    ]  # fmt: skip
    rows = []
    for load, arrivals, size, positions, longest, places, cited in loads:
        cost = cost_of(size, A100)
        before = simulate(arrivals, reserved(positions, longest, policy="orca", max_num_batched_tokens=8192), cost)
        engine = paged(
            positions, _BLOCK, policy="orca", max_num_batched_tokens=8192, max_num_seqs=places, max_tokens=longest // 2
        )
        after = simulate(arrivals, engine, cost)
        rows.append(
            {
                "load": load, "requests": len(arrivals), "paper": cited, "places": places,
                "reserved_rate": before.output_rate, "paged_rate": after.output_rate,
                "ratio": after.output_rate / before.output_rate, "reserved_running": running(before),
                "paged_running": running(after), "preemptions": after.preemptions,
            }
        )  # fmt: skip
    return rows


def sharing(study: Study) -> list[Row]:
    """vLLM: what parallel samples and beams save, counted in blocks of the engine's cache."""
    loads = [
        ("ShareGPT-like", sharegpt(study, 200), "16.2% to 30.5%", "44.3% to 66.3%"),
        ("Alpaca-like", alpaca(study, 400), "6.1% to 9.8%", "37.6% to 55.2%"),
        ("Azure conversations", study.azure(200), "", ""),
        (
            "prompts of 700, outputs of 338",
            study.random("lognormal:700,0.5", "lognormal:338,0.9", 200), "", "",
        ),
    ]  # fmt: skip
    rows = []
    for load, arrivals, samples, beams in loads:
        row: Row = {"load": load, "requests": len(arrivals), "paper": samples, "paper_beams": beams}
        row["samples"] = saved_by_sharing(arrivals, 0.0)
        # How often beams die out depends on the model: a tenth of the steps replace some, or all do.
        row["beams, a tenth of the steps"] = saved_by_sharing(arrivals, 0.1)
        row["beams, each step"] = saved_by_sharing(arrivals, 1.0)
        rows.append(row)
    return rows


def saved_by_sharing(arrivals: list[Arrival], replaced: float) -> float:
    """The share of blocks that sharing saves, over all decode steps of all requests.

    Args:
        arrivals: whose lengths are taken; each request has four sequences.
        replaced: the share of steps in which every beam continues one that is drawn at random.
    """
    draw = random.Random(0)
    shared = apart = 0
    for arrival in arrivals:
        most = _SAMPLES * (arrival.prompt + arrival.output) // _BLOCK + 2 * _SAMPLES
        cache = BlockCache(most, _BLOCK, enable_prefix_caching=False)
        first: list[int] = []
        cache.grow(first, 0, arrival.prompt)
        held = [first, *(cache.fork(first) for _ in range(_SAMPLES - 1))]
        for length in range(arrival.prompt, arrival.prompt + arrival.output):
            if replaced and draw.random() < replaced:
                chosen = [cache.fork(draw.choice(held)) for _ in held]
                for blocks in held:
                    cache.release(blocks)
                held = chosen
            for blocks in held:
                assert cache.grow(blocks, length, length + 1) is not None
            shared += cache.blocks - cache.free
            apart += _SAMPLES * cache.needed(length + 1)
    return 1 - shared / apart
