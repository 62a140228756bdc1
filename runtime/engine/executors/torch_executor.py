"""Synchronous execution of a step's plan, with sampling by torch on the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ...blocks.block_cache import Copy
from ...decoder.parts.batch import Run
from ...requests.sequence import Request, Sequence, TokenLogprobs, TokenScore
from ...sampling.beam_candidates import continuations
from ...sampling.logit_statistics import LogitStatistics
from ...sampling.sampling import Sampled, sample, top_logprobs
from ...scheduling.plan import Chunk, StepPlan
from ...speculation.counts import DraftOutcome
from ...speculation.drafter import Drafter, Drafts
from ...speculation.fixed_length import Drafted
from ...speculation.lookup_first import weights_of
from ...speculation.model_drafter import ModelDrafter
from ...speculation.tree import TokenTree, TreeRuns
from ...speculation.verification import verify
from ..ranks.workers import Workers
from ..setup.loading import on_device_of
from ..setup.parts import EngineParts
from .executor import CompletedStep, RunsBatches, StepHandle, StepResult


@dataclass(frozen=True)
class _Part:
    """A step's part of one sequence: its runs, and the draft that they verify."""

    chunk: Chunk
    runs: list[Run]
    tree: TokenTree | None = None
    copies: SequenceOf[Copy] = ()
    places: SequenceOf[int] = ()  # which of the sequence's blocks each branch would replace


class TorchExecutor:
    """Runs a model over a paged cache.

    Args:
        parts: of the engine.
        drafter: proposes tokens; None for none.
        workers: the other ranks; None if there are none.

    Attributes:
        model: the model; a profile wraps it with a timer.
    """

    def __init__(self, parts: EngineParts, drafter: Drafter | None = None, workers: Workers | None = None) -> None:
        self.model: RunsBatches = parts.model
        may_answer = parts.config.upper_bits_at is not None  # what drafts then is the model of the upper bits
        weights = weights_of(drafter)
        self._upper = weights if may_answer and isinstance(weights, ModelDrafter) else None
        self._lay_out = parts.model.batch
        self._store, self._host, self._ends = parts.store, parts.host, parts.ends
        self._device = on_device_of(parts.model)
        self._seed = parts.config.seed
        self._workers = workers
        self._drafting: Callable[[], AbstractContextManager[None]] = nullcontext
        if workers is not None and weights is not None and weights.is_whole:
            self._drafting = workers.waiting
        self.drafter = drafter

    def execute(self, plan: StepPlan) -> StepHandle:
        """Run a step."""
        return CompletedStep(self._compute(plan))

    @property
    def most_verified(self) -> int | None:
        """Any number."""
        return None

    @property
    def drafts_at_once(self) -> bool:
        """Never: the host chooses each token."""
        return False

    def runs_ahead(self, request: Request) -> bool:
        """Never."""
        return False

    @torch.inference_mode()
    def timed(self, tokens: int, *, drafts: bool) -> Tensor:
        """Each token is one of a sequence."""
        runs = [Run([0], 1, [0, 0], 2, 1)] * tokens
        if drafts:
            weights = weights_of(self.drafter)
            assert weights is not None
            with self._drafting():
                return weights.compute(runs)
        return self.by_model(runs)

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, draft, compute the plan's tokens and drafts, sample the next ones."""
        with nullcontext() if self._workers is None else self._workers.watched():
            self._move_blocks(plan)
            begun = time.perf_counter()
            with self._drafting():
                proposed = Drafts() if self.drafter is None else self.drafter.propose(plan)
            drafted = time.perf_counter()
            parts = [self._laid_out(chunk, proposed.of.get(chunk.sequence)) for chunk in plan.chunks]
            # Other ranks may copy all at once, so that none may depend on another.
            sources = {target: source for source, target in plan.copies}
            copies = [(sources.get(block, block), spare) for part in parts for block, spare in part.copies]
            self._move_blocks(StepPlan([], copies=copies))
            runs = [run for part in parts for run in part.runs]
            by_upper = [part.chunk.sequence.request.upper_bits for part in parts for _ in part.runs]
            there = self._computed(by_upper, runs)
            logits = there.cpu()
        stats = self.model.logit_statistics(logits)
        result = StepResult()
        rows: list[int] = []
        sampled: list[Sequence] = []
        verified: dict[Sequence, DraftOutcome] = {}
        place = 0
        for part in parts:
            chunk, sequence, run = part.chunk, part.chunk.sequence, part.runs[0]
            mine = slice(place, place + run.wants)
            place += sum(each.wants for each in part.runs)
            # Those after draft tokens may be of no use.
            sure = mine.stop if part.tree is None else mine.start + 1
            if not all(stats.is_sound(row) for row in range(mine.start, sure)):
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
            if part.tree is not None:
                draw = self.model.draw_tokens
                found = verify(logits, stats, mine.start, part.tree, sequence, self._ends, self._seed, draw)
                result.tokens[sequence] = found.tokens
                verified[sequence] = DraftOutcome.of(part.tree, found.reached, cut=found.reached != found.last)
                branch = part.tree.branch_at(found.last)
                if branch is not None:
                    index, block = part.places[branch], chunk.spare[branch]
                    assert self.drafter is not None
                    self.drafter.replaced(sequence, sequence.blocks[index], block)
                    result.replaced[sequence] = index, block
                continue
            of_prompt = sequence.request.sequences if not sequence.request.forked else [sequence]
            rows.extend([place - 1] * len(of_prompt))
            sampled.extend(of_prompt)
        if sampled:
            result.tokens |= self._chosen(there, logits, stats, rows, sampled)
        if self.drafter is not None:
            drafting = drafted - begun - proposed.preparing
            result.drafted = Drafted(verified, drafting, proposed.prepared, proposed.preparing)
        return result

    def _laid_out(self, chunk: Chunk, tree: TokenTree | None) -> _Part:
        """A chunk's runs, with those of its draft."""
        sequence = chunk.sequence
        stop = chunk.start + chunk.count
        tokens = sequence.tokens[chunk.start : stop]
        wants = max(0, stop - max(chunk.start, sequence.first_wanted))
        run = Run(tokens, chunk.start, sequence.blocks, sequence.request.grows_to, wants, sequence.request.adapter)
        if tree is None or not tree.chain:
            return _Part(chunk, [run])
        tree = tree.within(chunk.start, self._store.block_size, len(chunk.spare), chunk.drafts)
        laid_out = TreeRuns.of(run, tree, chunk.spare, self._store.block_size)
        return _Part(chunk, laid_out.runs, tree, laid_out.copies, laid_out.places)

    def _computed(self, by_upper: list[bool], runs: list[Run]) -> Tensor:
        """The runs' logits, of the model or of its upper bits."""
        if self._upper is None or not any(by_upper):
            return self.by_model(runs)
        starts = list(itertools.accumulate((run.wants for run in runs), initial=0))
        found: list[Tensor] = []
        rows: list[int] = []
        for upper, compute in ((False, self.by_model), (True, self._upper.compute)):
            mine = [i for i, each in enumerate(by_upper) if each == upper]
            if mine:
                found.append(compute([runs[i] for i in mine]))
                rows += [row for i in mine for row in range(starts[i], starts[i] + runs[i].wants)]
        logits = torch.cat(found)
        return torch.empty_like(logits).index_copy_(0, torch.tensor(rows, device=logits.device), logits)

    def by_model(self, runs: list[Run]) -> Tensor:
        """The logits that some tokens want of the model, of which other ranks compute their share."""
        if self._workers is not None:
            self._workers.compute_runs(runs)
        with self._device:
            return self.model(self._lay_out(runs, self._store.block_size), self._store)

    def _move_blocks(self, plan: StepPlan) -> None:
        if self._workers is not None:
            self._workers.move(plan)
        if self._host is not None:
            self._host.swap(plan)
        self._store.copy(plan.copies)

    def _chosen(
        self, there: Tensor, logits: Tensor, stats: LogitStatistics, rows: list[int], sequences: list[Sequence]
    ) -> dict[Sequence, list[Sampled]]:
        """The next token of each sequence from its row of the logits, which are on the device and on the CPU."""
        found = sample(logits, stats, rows, sequences, self._ends, self._seed, self.model.draw_tokens)
        return {sequence: [each] for sequence, each in zip(sequences, found, strict=True)}


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None and not sequence.request.forked


def _prompt_logprobs(sequence: Sequence, logits: Tensor) -> list[TokenLogprobs]:
    prompt, count = sequence.request.prompt, sequence.request.params.prompt_logprobs
    assert count is not None
    following = prompt[sequence.first_wanted + 1 :]
    totals = logits.logsumexp(-1).tolist()
    return [
        top_logprobs(row, total, token, count) for row, total, token in zip(logits, totals, following, strict=False)
    ]


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
