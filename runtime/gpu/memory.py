"""A step's GPU memory, measured on the largest step."""

from __future__ import annotations

from functools import partial

import torch

from ...system.hardware.device import on
from ..decoder.model import Model
from ..decoder.parts.batch import Run
from ..kernels.base.launch import overlapping
from ..kernels.base.precompile import precompile_work


def measured_activations(model: Model, token_budget: int, max_sequences: int, block_size: int) -> int:
    """Bytes that the largest step needs besides weights and cache: the longest prompts, with logits for many tokens.

    Args:
        model: loaded.
        token_budget: the most tokens of a step.
        max_sequences: the most sequences of one.
        block_size: positions in a cache block.
    """
    device = model.device
    longest = min(token_budget, model.spec.max_length)
    each = -(-longest // block_size)
    fusions = model.operators.fusions
    with on(device, partial(overlapping, fusions is None or fusions.overlap)):
        store = model.keys_values(-(-token_budget // longest) * each, block_size, model.dtype)
        runs, wanted = list[Run](), min(max_sequences, token_budget)
        for i, begin in enumerate(range(0, token_budget, longest)):
            count = min(longest, token_budget - begin)
            mine = list(range(i * each, (i + 1) * each))
            runs.append(Run([0] * count, 0, mine, count, min(wanted, count)))
            wanted -= runs[-1].wants
        step = model.batch(runs, block_size)
        precompile_work([lambda: model(step, store)], lambda _: None)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        model(step, store)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
