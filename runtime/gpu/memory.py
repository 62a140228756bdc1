"""A step's GPU memory, measured on the largest step."""

from __future__ import annotations

from functools import partial

import torch

from ...system.hardware.device import on
from ..decoder.model import Model
from ..decoder.parts.batch import Run
from ..kernels.base.launch import overlapping
from ..kernels.base.precompile import precompile_work


def measured_activations(model: Model, max_num_batched_tokens: int, max_num_seqs: int, block_size: int) -> int:
    """Bytes that the largest step needs besides weights and cache: the longest prompts, with logits for many tokens.

    Args:
        model: loaded.
        max_num_batched_tokens: the most tokens of a step.
        max_num_seqs: the most sequences of one.
        block_size: positions in a cache block.
    """
    device = model.device
    longest = min(max_num_batched_tokens, model.spec.max_length)
    each = -(-longest // block_size)
    fusions = model.operators.fusions
    with on(device, partial(overlapping, fusions is None or fusions.overlap)):
        store = model.keys_values(-(-max_num_batched_tokens // longest) * each, block_size, model.dtype)
        runs, wanted = list[Run](), min(max_num_seqs, max_num_batched_tokens)
        for i, begin in enumerate(range(0, max_num_batched_tokens, longest)):
            count = min(longest, max_num_batched_tokens - begin)
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
