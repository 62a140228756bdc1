"""Swapping to host memory against computing again, when a sequence loses its blocks."""

from __future__ import annotations

from dataclasses import replace

from smelt.runtime.costs.model_size import ModelSize
from smelt.runtime.costs.swap_cost import SwapCost
from smelt.runtime.costs.work import StepCost, StepWork
from smelt.runtime.scheduling.swapping import SwapMode, TransferCost
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.simulation import simulate

from .setting import A100, H100, LLAMA_3_8B, LLAMA_13B, Row, Study, cost_of, transfers

_SIZES = (64_000, 500_000, 2_000_000)
_BUDGET = 512
# Sequences that decode beside it, each so far.
_OTHERS, _CONTEXT = 32, 512
_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BLOCK = 16
_MODES: tuple[SwapMode, ...] = ("recompute", "swap", "auto")


def predicted(study: Study) -> list[Row]:
    """From which length on two transfers take less time than computing again."""
    rows = []
    for size in (LLAMA_3_8B, LLAMA_13B):
        for device in (A100, H100):
            cost = cost_of(size, device)
            row: Row = {"model": size.name, "device": device}
            for length in (128, 1024, 8192):
                row[f"again_{length}"] = _again(cost, length)
            for transfer_bytes in _SIZES:
                transfer = transfers(size, device, transfer_bytes)
                row[f"swap_1024_{transfer_bytes}"] = _there_and_back(transfer, 1024)
                wins = [n for n in _LENGTHS if _there_and_back(transfer, n) < _again(cost, n)]
                # Both grow with length; what is slower at the longest is slower at all but perhaps some between.
                row[f"from_{transfer_bytes}"] = wins[0] if wins else None
                row[f"wins_{transfer_bytes}"] = wins
            rows.append(row)
    return rows


def _there_and_back(transfer: TransferCost, length: int) -> float:
    return 2 * transfer.seconds(-(-length // _BLOCK))


def _again(cost: StepCost, length: int) -> float:
    """What the pieces of so many tokens add to steps that decode others."""
    decodes = StepWork(_OTHERS, _OTHERS, _OTHERS * _CONTEXT, _OTHERS * _CONTEXT, 0, _OTHERS)
    total = 0.0
    for start in range(0, length, _BUDGET - _OTHERS):
        count = min(_BUDGET - _OTHERS, length - start)
        pairs = count * start + count * (count + 1) // 2
        work = replace(
            decodes, tokens=_OTHERS + count, cached=decodes.cached + start + count, pairs=decodes.pairs + pairs,
            chunks=_OTHERS + 1, prompts=1, prompt_pairs=pairs,
        )  # fmt: skip
        total += cost.seconds(work) - cost.seconds(decodes)
    return total


def simulated(study: Study) -> list[Row]:
    """The same on loads that preempt: a cache for fewer sequences than run."""
    rows = []
    for size in (LLAMA_3_8B, LLAMA_13B):
        for prompt in (64, 512, 2048):
            rows += _load(study, size, prompt)
    return rows


def _load(study: Study, size: ModelSize, prompt: int) -> list[Row]:
    arrivals = study.random(f"fixed:{prompt}", "lognormal:300,0.8", 150, longest=4096)
    # 24 sequences start, and have no room for half of what they generate.
    blocks = max(24 * (prompt + 150) // _BLOCK, 4096 // _BLOCK + 1)
    rows = []
    for transfer_bytes in _SIZES:
        transfer = transfers(size, A100, transfer_bytes)
        cost = SwapCost(cost_of(size, A100), transfer)
        row: Row = {"model": size.name, "prompt": prompt, "transfer": transfer_bytes, "requests": len(arrivals)}
        for mode in _MODES:
            engine = SimulatedEngine(
                blocks, admission="immediate", max_num_seqs=64, host_blocks=50_000, transfer=transfer, max_tokens=4096
            )
            found = simulate(arrivals, replace(engine, swap=mode), cost)
            row[f"{mode}_rate"], row[f"{mode}_preemptions"], row[f"{mode}_swaps"] = (
                found.output_rate, found.preemptions, found.swaps,
            )  # fmt: skip
        rows.append(row)
    return rows
