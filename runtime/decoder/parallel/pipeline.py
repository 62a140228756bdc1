"""A step through the stages of a pipeline, in pieces that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...parallel.stages import ConnectedStages
from ..parts.batch import Batch, Run
from ..parts.kv_cache import KeysValues
from .staged_states import StagedStates

# Pieces for each stage: more leave stages idle for less of the time, and cost more calls.
_PIECES = 2
# Smaller ones take as long as these.
_LEAST_TOKENS = 16


class StageModel(Protocol):
    """The part of a model that a stage needs."""

    dtype: torch.dtype
    device: torch.device

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor: ...
    def through(self, hidden: Tensor, batch: Batch, store: KeysValues) -> Tensor: ...


@dataclass(frozen=True)
class Result:
    """What the last stage makes of its layers' outputs for the rank that samples.

    Attributes:
        of: a piece's outputs.
        rows: how many rows that is.
        width: of a row.
        dtype: of its numbers.
    """

    of: Callable[[Tensor, Batch], Tensor]
    rows: Callable[[Batch], int]
    width: int
    dtype: torch.dtype


def equal_pieces(runs: list[Run], count: int) -> list[list[Run]]:
    """Runs cut into pieces of equally many tokens, in order; a run may be cut, as its first part is computed first.

    Args:
        runs: of a step.
        count: how many pieces, at most.
    """
    total = sum(len(run.tokens) for run in runs)
    count = min(count, total)
    pieces: list[list[Run]] = [[] for _ in range(count)]
    done, piece = 0, 0
    for run in runs:
        while run.tokens:
            end = total * (piece + 1) // count
            taken = min(len(run.tokens), end - done)
            after = len(run.tokens) - taken
            first = tuple(pair for pair in run.also if pair[0] < taken)
            others = tuple((token - taken, slot) for token, slot in run.also if token >= taken)
            wants = max(0, run.wants - after)
            pieces[piece].append(replace(run, tokens=run.tokens[:taken], wants=wants, also=first))
            wants = min(run.wants, after)
            run = replace(run, tokens=run.tokens[taken:], start=run.start + taken, wants=wants, also=others)
            done += taken
            piece += done == end
    return pieces


def pieces_of(batch: Batch, stages: int) -> list[list[Run]]:
    """A step's pieces for so many stages."""
    return equal_pieces(batch.runs, piece_count(len(batch.tokens), stages))


def piece_count(tokens: int, stages: int) -> int:
    """How many pieces a step of so many tokens has."""
    most = max(1, tokens // _LEAST_TOKENS)
    return max(min(stages, tokens), min(most, _PIECES * stages))


def pipelined(
    model: StageModel,
    stages: ConnectedStages,
    pieces: Sequence[list[Run]],
    block_size: int,
    store: KeysValues,
    hidden: int,
    result: Result,
    aux: StagedStates | None = None,
) -> Tensor:
    """This stage's share of a step. Returns the result on the rank that samples, and none elsewhere.

    Args:
        model: with this stage's layers.
        stages: all of them.
        pieces: of the whole step.
        block_size: positions in a cache block.
        store: with this stage's keys and values.
        hidden: the width of hidden states.
        result: of the last stage.
        aux: what a draft head reads besides; None if there is none.
    """
    batches = [Batch(runs, block_size) for runs in pieces]
    found, left = list[Tensor](), list[Tensor]()
    beside, arrived = 0 if aux is None else aux.arriving, torch.empty(0)
    if aux is not None:
        aux.begin()
    for piece in batches:
        if stages.is_first:
            states = model.embed(piece.tokens, piece.positions)
        else:
            received = stages.receive((len(piece.tokens), hidden * (1 + beside)), model.dtype, model.device)
            states, arrived = received[:, :hidden].contiguous(), received[:, hidden:]
        states = model.through(states, piece, store)
        further = None if aux is None or not aux.collected or stages.is_first else aux.passed_on(arrived)
        if not stages.is_last:
            stages.send(states if further is None else torch.cat([states, further], 1))
            continue
        if result.rows(piece):
            found.append(result.of(states, piece))
        if further is not None:
            left.append(further)
    # After all pieces: NCCL carries what two ranks send each other in the order in which each has asked for it, and with results in
    # between both would wait for ever.
    if found and stages.sends_result:
        stages.send(torch.cat(found))
    if left and stages.sends_result:
        stages.send(torch.cat(left))
    rows = sum(result.rows(piece) for piece in batches) if stages.gets_result else 0
    received = stages.receive((rows, result.width), result.dtype, model.device) if rows else None
    if aux is not None and stages.gets_result:
        step = Batch([run for piece in pieces for run in piece], block_size)
        shape = len(step.tokens), aux.collected * hidden
        aux.finish(step, stages.receive(shape, model.dtype, model.device) if aux.collected else torch.empty(shape))
    stages.wait()
    return torch.empty(0, result.width) if received is None else received
