"""What a step takes of a GPU's memory, measured on the largest one."""

from __future__ import annotations

import torch

from ..batch import Batch, Run
from ..kernels.precompile import precompile_work
from ..model import Model


def measured_activations(model: Model, token_budget: int, max_sequences: int, block_size: int) -> int:
    """Bytes that the largest step needs beside weights and cache: a prompt as long as a step, many of whose logits are wanted.

    Args:
        model: loaded.
        token_budget: the most tokens of a step.
        max_sequences: the most sequences of one.
        block_size: positions in a cache block.
    """
    device = model.device
    blocks = -(-token_budget // block_size)
    with torch.cuda.device(device), device:
        store = model.keys_values(blocks, block_size, model.dtype)
        run = Run([0] * token_budget, 0, list(range(blocks)), token_budget, min(max_sequences, token_budget))
        step = Batch([run], block_size)
        precompile_work([lambda: model(step, store)], lambda _: None)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        model(step, store)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
