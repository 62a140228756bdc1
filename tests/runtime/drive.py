"""Helpers to run the runtime's parts in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from smelt.runtime import Engine
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.batch import Run
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.parallel.ranks import Ranks
from smelt.runtime.parallel.stages import Stages
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.offload import OffloadedLayers
from torch import Tensor


def engine(path: Path, **options: Any) -> Engine:
    """A small engine in float32."""
    return Engine(
        path,
        **{"dtype": "float32", "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8, "quiet": True}
        | options,
    )


def logits_in_pieces(
    path: Path,
    prompts: list[list[int]],
    steps: list[list[tuple[int, int]]],
    operators: Operators | None = None,
    kept: torch.dtype | None = None,
    ranks: Ranks | None = None,
    stages: Stages | None = None,
    context: Ranks | None = None,
    offload: OffloadedLayers | None = None,
    divides_experts: bool = False,
) -> list[Tensor]:
    """Each prompt's logits, computed as ``steps`` say: a step lists prompts and how many of their tokens it takes."""
    size = 8
    model = Model(
        Checkpoint(path),
        operators or Operators(torch.float32),
        ranks=ranks,
        stages=stages,
        context=context,
        offload=offload,
        divides_experts=divides_experts,
    )
    needed = [-(-len(prompt) // size) for prompt in prompts]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in needed]
    store = model.keys_values(sum(needed), size // model.context.count, kept or model.dtype)
    done = [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        runs = []
        for which, count in step:
            tokens = prompts[which][done[which] : done[which] + count]
            runs.append(Run(tokens, done[which], blocks[which], len(prompts[which]), len(tokens)))
            done[which] += count
        with model.device:
            logits = model(model.batch(runs, size // model.context.count), store).cpu()
        if stages is not None and not stages.gets_result:
            continue  # they are another rank's
        for (which, _), part in zip(step, logits.split([len(run.tokens) for run in runs]), strict=True):
            found[which].append(part)
    assert done == [len(prompt) for prompt in prompts]
    return [torch.cat(parts) for parts in found if parts]
