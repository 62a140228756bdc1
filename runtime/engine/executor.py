"""Carrying out a step's plan with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...system.device import on
from ..decoder.batch import Batch, Run
from ..decoder.kv_cache import KeysValues
from ..decoder.logit_statistics import Survey
from ..decoder.model import Model
from ..kernels.base.launch import overlapping
from .beam import continuations
from .sampling import Sampled, sample, top_logprobs
from .scheduler import Chunk, StepPlan
from .sequence import Candidate, Request, Sequence, TokenLogprobs, TokenScore


@dataclass
class StepResult:
    """What a step found.

    Attributes:
        tokens: the next token of each sequence that was computed to its end (all samples of a prompt at once).
        continuations: in beam search, each beam's candidates instead.
        prompt_logprobs: for each sequence, of the prompt tokens that follow those computed.
        scores: of each sequence's expected tokens that were reached (of all a prompt's continuations at once).
        broken: sequences whose logits are not numbers.
    """

    tokens: dict[Sequence, Sampled] = field(default_factory=dict)
    continuations: dict[Sequence, list[Candidate]] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[Sequence, list[TokenScore]] = field(default_factory=dict)
    broken: list[Sequence] = field(default_factory=list)


class RunsBatches(Protocol):
    """What the executor needs of a model."""

    @property
    def survey(self) -> Callable[[Tensor], Survey]: ...

    def __call__(self, batch: Batch, store: KeysValues) -> Tensor: ...


class Flight(Protocol):
    """A step that was started.

    Attributes:
        settled: whether it is done already, so that nothing is won by starting the next one before asking for its result.
    """

    @property
    def settled(self) -> bool: ...

    def result(self) -> StepResult:
        """What it found; waits for it."""
        ...


@dataclass(frozen=True)
class Landed:
    """A step that was carried out at once."""

    found: StepResult
    settled: bool = True

    def result(self) -> StepResult:
        """What it found."""
        return self.found


class Executor(Protocol):
    """Carries out plans: with a model, or with a clock in the simulator.

    Attributes:
        model: what computes; a profile puts a clock around it.
    """

    model: RunsBatches

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step."""
        ...

    def runs_ahead(self, request: Request) -> bool:
        """Whether steps with this request may be started before the ones before them have given their tokens."""
        ...


class TorchExecutor:
    """Runs a model over a paged cache.

    Args:
        model: the model.
        store: its keys and values.
        ends: tokens that end a sequence.
        seed: for requests that bring none.

    Attributes:
        model: what computes; a profile puts a clock around it.
    """

    def __init__(self, model: Model, store: KeysValues, ends: frozenset[int], seed: int) -> None:
        self.model: RunsBatches = model
        self._store = store
        fusions = getattr(model.operators, "fusions", None)
        self._device = on(model.device, partial(overlapping, fusions is None or fusions.overlap))
        self._ends = ends
        self._seed = seed

    def launch(self, plan: StepPlan) -> Flight:
        """Carry out a step."""
        return Landed(self.execute(plan))

    def runs_ahead(self, request: Request) -> bool:
        """Never."""
        return False

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, choose the next ones."""
        self._store.copy(plan.copies)
        runs = [_run(chunk) for chunk in plan.chunks]
        with self._device:
            there = self.model(Batch(runs, self._store.block_size), self._store)
        logits = there.cpu()
        seen = self.model.survey(logits)
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
            if sequence.expected:
                result.scores |= _scores(sequence, logits, seen, mine)
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
            result.tokens = self._chosen(there, logits, seen, rows, sampled)
        return result

    def _chosen(
        self, there: Tensor, logits: Tensor, seen: Survey, rows: list[int], sequences: list[Sequence]
    ) -> dict[Sequence, Sampled]:
        """The next token of each sequence, by its row of the logits, which are on the device and on the CPU."""
        found = sample(logits, seen, rows, sequences, self._ends, self._seed)
        return dict(zip(sequences, found, strict=True))


def _run(chunk: Chunk) -> Run:
    sequence = chunk.sequence
    stop = chunk.start + chunk.count
    tokens = sequence.tokens[chunk.start : stop]
    wants = max(0, stop - max(chunk.start, sequence.first_wanted))
    return Run(tokens, chunk.start, sequence.blocks, sequence.request.grows_to, wants)


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None and not sequence.request.forked


def _prompt_logprobs(sequence: Sequence, logits: Tensor) -> list[TokenLogprobs]:
    prompt, count = sequence.request.prompt, sequence.request.params.prompt_logprobs
    assert count is not None
    following = prompt[sequence.first_wanted + 1 :]
    return [top_logprobs(row, token, count) for row, token in zip(logits, following, strict=False)]


def _scores(sequence: Sequence, logits: Tensor, seen: Survey, rows: slice) -> dict[Sequence, list[TokenScore]]:
    """What rows say of the expected tokens; a prompt's last row says it of all its continuations."""
    request = sequence.request
    return {
        each: [
            TokenScore(logits[row, token].item() - seen.total[row], token == seen.best[row])
            for row, token in zip(range(rows.start, rows.stop), each.expected[len(each.scores) :], strict=False)
        ]
        for each in (request.sequences if not request.forked else [sequence])
    }
