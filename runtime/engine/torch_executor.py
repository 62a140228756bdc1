"""Synchronous execution of a step's plan, with sampling by torch on the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ...system.device import on
from ..decoder.batch import Run
from ..decoder.kv_cache import KeysValues
from ..decoder.logit_statistics import LogitStatistics
from ..decoder.model import Model
from ..kernels.base.launch import overlapping
from ..requests.sequence import Request, Sequence, TokenLogprobs, TokenScore
from ..scheduling.plan import Chunk, StepPlan
from .beam import continuations
from .executor import CompletedStep, RunsBatches, StepHandle, StepResult
from .host_blocks import HostBlocks
from .sampling import Sampled, sample, top_logprobs
from .workers import StepMessage, Workers


def on_device_of(model: Model) -> AbstractContextManager[object]:
    """Where a model's steps are laid out and computed. May be entered again and again."""
    fusions = model.operators.fusions
    return on(model.device, partial(overlapping, fusions is None or fusions.overlap))


class TorchExecutor:
    """Runs a model over a paged cache.

    Args:
        model: the model.
        store: its KV cache.
        ends: tokens that end a sequence.
        seed: for requests without one.
        host: blocks in host memory; None if plans swap none.
        workers: the other ranks; None if there are none.

    Attributes:
        model: the model; a profile wraps it with a timer.
    """

    def __init__(
        self,
        model: Model,
        store: KeysValues,
        ends: frozenset[int],
        seed: int,
        host: HostBlocks | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.model: RunsBatches = model
        self._lay_out = model.batch
        self._store = store
        self._host = host
        self._device = on_device_of(model)
        self._ends = ends
        self._seed = seed
        self._workers = workers

    def execute(self, plan: StepPlan) -> StepHandle:
        """Run a step."""
        return CompletedStep(self._compute(plan))

    def runs_ahead(self, request: Request) -> bool:
        """Never."""
        return False

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, sample the next ones."""
        runs = [_run(chunk) for chunk in plan.chunks]
        with nullcontext() if self._workers is None else self._workers.watched():
            if self._workers is not None:
                self._workers.compute(StepMessage(plan, runs))
            self._move_blocks(plan)
            with self._device:
                there = self.model(self._lay_out(runs, self._store.block_size), self._store)
        logits = there.cpu()
        stats = self.model.logit_statistics(logits)
        result = StepResult()
        rows: list[int] = []
        sampled: list[Sequence] = []
        place = 0
        for chunk, run in zip(plan.chunks, runs, strict=True):
            mine = slice(place, place + run.wants)
            place += run.wants
            sequence = chunk.sequence
            if not all(stats.is_sound(row) for row in range(mine.start, mine.stop)):
                result.broken.append(sequence)
                continue
            if sequence.expected:
                result.scores |= _scores(sequence, logits, stats, mine)
                continue
            if _wants_prompt_logprobs(sequence):
                result.prompt_logprobs[sequence] = _prompt_logprobs(sequence, logits[mine])
            if not chunk.is_last:
                continue
            if sequence.request.params.is_beam_search:
                result.continuations[sequence] = continuations(logits[place - 1], sequence, self._ends)
                continue
            of_prompt = sequence.request.sequences if not sequence.request.forked else [sequence]
            rows.extend([place - 1] * len(of_prompt))
            sampled.extend(of_prompt)
        if sampled:
            result.tokens = self._chosen(there, logits, stats, rows, sampled)
        return result

    def _move_blocks(self, plan: StepPlan) -> None:
        if self._host is not None:
            self._host.swap(plan)
        self._store.copy(plan.copies)

    def _chosen(
        self, there: Tensor, logits: Tensor, stats: LogitStatistics, rows: list[int], sequences: list[Sequence]
    ) -> dict[Sequence, Sampled]:
        """The next token of each sequence from its row of the logits, which are on the device and on the CPU."""
        found = sample(logits, stats, rows, sequences, self._ends, self._seed)
        return dict(zip(sequences, found, strict=True))


def _run(chunk: Chunk) -> Run:
    sequence = chunk.sequence
    stop = chunk.start + chunk.count
    tokens = sequence.tokens[chunk.start : stop]
    wants = max(0, stop - max(chunk.start, sequence.first_wanted))
    return Run(tokens, chunk.start, sequence.blocks, sequence.request.grows_to, wants, sequence.request.adapter)


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None and not sequence.request.forked


def _prompt_logprobs(sequence: Sequence, logits: Tensor) -> list[TokenLogprobs]:
    prompt, count = sequence.request.prompt, sequence.request.params.prompt_logprobs
    assert count is not None
    following = prompt[sequence.first_wanted + 1 :]
    return [top_logprobs(row, token, count) for row, token in zip(logits, following, strict=False)]


def _scores(
    sequence: Sequence, logits: Tensor, stats: LogitStatistics, rows: slice
) -> dict[Sequence, list[TokenScore]]:
    """Scores of the expected tokens from rows of logits; a prompt's last row serves all its continuations."""
    request = sequence.request
    return {
        each: [
            TokenScore(logits[row, token].item() - stats.total[row], token == stats.best[row])
            for row, token in zip(range(rows.start, rows.stop), each.expected[len(each.scores) :], strict=False)
        ]
        for each in (request.sequences if not request.forked else [sequence])
    }
