"""Carrying out a step's plan with a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .batch import Batch, Run
from .beam import continuations
from .keys_values import PagedKeysValues
from .model import Model
from .sampling import Sampled, sample, top_logprobs
from .scheduler import Chunk, StepPlan
from .sequence import Candidate, Sequence, TokenLogprobs


@dataclass
class StepResult:
    """What a step found.

    Attributes:
        tokens: the next token of each sequence that was computed to its end (all samples of a prompt at once).
        continuations: in beam search, each beam's candidates instead.
        prompt_logprobs: for each sequence, of the prompt tokens that follow those computed.
        broken: sequences whose logits are not numbers.
    """

    tokens: dict[Sequence, Sampled] = field(default_factory=dict)
    continuations: dict[Sequence, list[Candidate]] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    broken: list[Sequence] = field(default_factory=list)


class Executor(Protocol):
    """Carries out plans: with a model, or with a clock in the simulator."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class TorchExecutor:
    """Runs a model over a paged cache.

    Args:
        model: the model.
        store: its keys and values.
        ends: tokens that end a sequence.
        seed: for requests that bring none.
    """

    def __init__(self, model: Model, store: PagedKeysValues, ends: frozenset[int], seed: int) -> None:
        self._model = model
        self._store = store
        self._ends = ends
        self._seed = seed

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, choose the next ones."""
        self._store.copy(plan.copies)
        runs = [_run(chunk) for chunk in plan.chunks]
        logits = self._model(Batch(runs, self._store.block_size), self._store)
        seen = self._model.survey(logits)
        result = StepResult()
        rows: list[int] = []
        sampled: list[Sequence] = []
        place = 0
        for chunk, run in zip(plan.chunks, runs, strict=True):
            mine = slice(place, place + run.wants)
            place += run.wants
            sequence = chunk.sequence
            if not all(seen.is_sound(row) for row in range(mine.start, mine.stop)):
                result.broken.append(sequence)
                continue
            if _wants_prompt_logprobs(sequence):
                result.prompt_logprobs[sequence] = _prompt_logprobs(chunk, logits[mine])
            if not chunk.is_last:
                continue
            if sequence.request.params.is_beam_search:
                result.continuations[sequence] = continuations(logits[place - 1], sequence, self._ends)
                continue
            of_prompt = sequence.request.sequences if not sequence.request.forked else [sequence]
            rows.extend([place - 1] * len(of_prompt))
            sampled.extend(of_prompt)
        if sampled:
            found = sample(logits, seen, rows, sampled, self._ends, self._seed)
            result.tokens = dict(zip(sampled, found, strict=True))
        return result


def _run(chunk: Chunk) -> Run:
    sequence = chunk.sequence
    tokens = sequence.tokens[chunk.start : chunk.start + chunk.count]
    wants = chunk.count if _wants_prompt_logprobs(sequence) else int(chunk.is_last)
    return Run(tokens, chunk.start, sequence.blocks, sequence.request.grows_to, wants)


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None and not sequence.request.forked


def _prompt_logprobs(chunk: Chunk, logits: Tensor) -> list[TokenLogprobs]:
    prompt, count = chunk.sequence.request.prompt, chunk.sequence.request.params.prompt_logprobs
    assert count is not None
    following = prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
    return [top_logprobs(row, token, count) for row, token in zip(logits, following, strict=False)]
