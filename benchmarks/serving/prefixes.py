"""Prompts that begin alike: sessions of several turns, and Mooncake's conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smelt.runtime.costs.swap_cost import SwapCost
from smelt.runtime.requests.trace import PREFIX_BLOCK, Arrival
from smelt.runtime.scheduling.swapping import TransferCost
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.results import Distribution, Served
from smelt.runtime.simulate.simulation import simulate

from .setting import A100, H100, LLAMA_3_8B, TRANSFER_SECONDS, Row, Study, blocks_of, cost_of, transfers

_TURNS = 8
_PAUSE = 20.0
# Seconds between the beginnings of sessions: an engine that shares nothing still keeps up.
_APART = 6.0
_TRANSFER = 2_000_000
# The answers' tokens, which are zeros in the simulator, too.
_ANSWER = 0
_RANKS = 8


def turns(study: Study) -> list[Row]:
    """LMDeploy, RadixAttention: a session's next turn pays for its new tokens only."""
    sessions = study.count(96)
    arrivals = _sessions(sessions)
    cold = [replace(each, prefix=()) for each in arrivals]
    fits = blocks_of(LLAMA_3_8B, A100)
    transfer = transfers(LLAMA_3_8B, A100, _TRANSFER)
    cost = SwapCost(cost_of(LLAMA_3_8B, A100), transfer)
    large, small = SimulatedEngine(fits, max_num_seqs=128), SimulatedEngine(fits // 4, max_num_seqs=128)
    host = replace(small, host_blocks=2 * fits, transfer=transfer)
    rows = []
    for way, engine, load in (
        ("no sharing", large, cold),
        ("cache of an A100", large, arrivals),
        ("a quarter of it", small, arrivals),
        ("a quarter of it, and host memory", host, arrivals),
    ):
        found = simulate(load, engine, cost)
        last = [each for each in found.served if arrivals[each.number].prompt == _prompt(_TURNS)]
        later = [each for each in found.served if arrivals[each.number].prompt > _prompt(1)]
        rows.append(
            {
                "way": way, "requests": len(load), "sessions": sessions, "cached_share": found.cached_share,
                "computed_last": sum(each.prompt - each.cached for each in last) / len(last),
                "first_token_last": _first(last).mean, "first_token_later": _first(later).mean,
                "p99_later": _first(later).p99, "swapped_blocks": found.swapped_blocks,
                "new": PREFIX_BLOCK, "prompt_last": _prompt(_TURNS),
            }
        )  # fmt: skip
    return rows


def _prompt(turn: int) -> int:
    """The tokens of a turn's prompt: all questions and answers before, and its question; each has 512, the system prompt 1,024."""
    return PREFIX_BLOCK * (2 + 2 * turn - 1)


def _sessions(count: int) -> list[Arrival]:
    """Sessions that begin one after another, with a pause between their turns."""
    found = []
    for session in range(count):
        marks = [-1, -2]  # the system prompt, which all share
        for turn in range(_TURNS):
            marks = [*marks, 1 + session * _TURNS + turn]
            at = _APART * session + turn * _PAUSE
            found.append(Arrival(at, len(marks) * PREFIX_BLOCK, PREFIX_BLOCK, tuple(marks)))
            marks.append(_ANSWER)
    return sorted(found, key=lambda each: each.at)


def _first(served: Sequence[Served]) -> Distribution:
    return Distribution.of([each.first - each.at for each in served])


def mooncake(study: Study) -> list[Row]:
    """Mooncake: the share of its trace's prompts that a cache finds."""
    arrivals = study.mooncake(12031)
    block = PREFIX_BLOCK
    size = LLAMA_3_8B
    fits = blocks_of(size, H100, block, f"tensor:{_RANKS}")
    plain = cost_of(size, H100, tensor_parallel=_RANKS)
    # Each device copies its own heads.
    one = transfers(size, H100, _TRANSFER, block)
    transfer = TransferCost(one.block_bytes, _TRANSFER * _RANKS, TRANSFER_SECONDS, _RANKS * one.bytes_per_second)
    everything = len({mark for each in arrivals for mark in each.prefix}) + 2 * fits
    ideal, blockwise = ideal_hits(arrivals)
    rows: list[Row] = [
        {"way": "the trace's own prefixes", "paper": "40%", "requests": len(arrivals), "cached_share": ideal, "blocks": blockwise},
        {"way": "its second half", "paper": "", "requests": len(arrivals) // 2, "cached_share": ideal_hits(arrivals, len(arrivals) // 2)[0]},
    ]  # fmt: skip
    cold = [replace(each, prefix=()) for each in arrivals]
    for way, engine, load in (
        ("no sharing", SimulatedEngine(fits), cold),
        ("unlimited cache", SimulatedEngine(everything), arrivals),
        ("a quarter of the devices' cache", SimulatedEngine(fits // 4), arrivals),
        ("the devices' cache", SimulatedEngine(fits), arrivals),
        (
            "the devices' cache, 2 TB of host memory",
            SimulatedEngine(fits, host_blocks=int(2e12 / transfer.block_bytes), transfer=transfer), arrivals,
        ),
    ):  # fmt: skip
        options = replace(engine, block_size=block, max_num_seqs=256, max_num_batched_tokens=8192)
        found = simulate(load, options, SwapCost(plain, transfer))
        rows.append(
            {
                "way": way, "paper": "", "requests": len(load), "cached_share": found.cached_share,
                "cache_blocks": engine.blocks, "host_blocks": engine.host_blocks, "first_token": found.first_token.mean,
                "p99_first": found.first_token.p99, "busy": found.busy, "swapped_blocks": found.swapped_blocks,
                "queue": found.queue.mean,
            }
        )  # fmt: skip
    return rows


def ideal_hits(arrivals: Sequence[Arrival], start: int = 0) -> tuple[float, float]:
    """What an unlimited cache without delay finds, from the trace's hashes alone: the share of tokens, and that of blocks.

    Args:
        arrivals: the trace.
        start: the requests before it fill the cache, and are not counted.
    """
    seen: set[int] = set()
    tokens = blocks = 0
    for number, arrival in enumerate(arrivals):
        found = 0
        while found < len(arrival.prefix) and arrival.prefix[found] in seen:
            found += 1
        seen.update(arrival.prefix)
        if number >= start:
            tokens += min(found * PREFIX_BLOCK, arrival.prompt)
            blocks += found
    counted = arrivals[start:]
    return tokens / sum(each.prompt for each in counted), blocks / sum(len(each.prefix) for each in counted)
