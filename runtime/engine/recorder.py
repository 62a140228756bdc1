"""What a step computed, written into its requests."""

from __future__ import annotations

from typing import Any

from ..requests.sequence import Request, Sequence
from ..requests.text_stream import TextStream
from ..sampling.sampling import Sampled
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler, live
from .beam import advance
from .executors.executor import StepResult


class Recorder:
    """Extends sequences by their new tokens, and ends those that are complete.

    Args:
        scheduler: whose sequences they are.
        ends: the model's end tokens.
        tokenizer: for texts; None if the model has none.
    """

    def __init__(self, scheduler: Scheduler, ends: frozenset[int], tokenizer: Any) -> None:
        self._scheduler, self._ends, self._tokenizer = scheduler, ends, tokenizer

    def record(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Write the results of a committed step; returns the requests that progressed."""
        changed: dict[str, Request] = {}
        for sequence in result.broken:
            request = sequence.request
            if sequence.finish is not None:
                continue  # it ended while this step was running
            request.error = "the model's logits are NaN or infinite; the checkpoint or its quantization is broken"
            self.end(request, "error")
            changed[request.id] = request
        for sequence, logprobs in result.prompt_logprobs.items():
            sequence.request.prompt_logprobs.extend(logprobs)
        self._fork(plan)
        for sequence, scores in result.scores.items():
            if sequence.finish is None:
                sequence.scores.extend(scores)
                if len(sequence.scores) == len(sequence.expected):
                    self._end(sequence, "stop")
                    changed[sequence.request.id] = sequence.request
        for sequence, tokens in result.tokens.items():
            if sequence.finish is None:  # otherwise a sibling's logits were not finite
                self._scheduler.accepted(sequence, len(tokens) - 1)
                changed[sequence.request.id] = sequence.request
            for count, sampled in enumerate(tokens):
                if sequence.finish is not None:
                    self._stopped_within_draft(sequence, count, result)
                    break
                self._append(sequence, sampled)
        for sequence, outcome in {} if result.drafted is None else result.drafted.of.items():
            sequence.request.draft_tokens += outcome.drafted + outcome.branched
            sequence.request.accepted_tokens += outcome.accepted + outcome.on_branch
        for sequence, candidates in result.continuations.items():
            if sequence.finish is not None:
                continue
            sequence.candidates = candidates
            if advance(sequence.request, self._scheduler, self._ends):
                self._write_beams(sequence.request)
                changed[sequence.request.id] = sequence.request
        return list(changed.values())

    def end(self, request: Request, reason: str) -> None:
        """End all sequences of a request that have not ended."""
        for sequence in live(request):
            self._end(sequence, reason)

    def _fork(self, plan: StepPlan) -> None:
        """Fork a prompt's samples once it is computed."""
        for chunk in plan.chunks:
            request = chunk.sequence.request
            if chunk.is_last and not request.forked and request.error is None:
                request.forked = True
                if not request.params.is_beam_search:
                    for child in request.sequences[1:]:
                        self._scheduler.fork(chunk.sequence, child)
                for sequence in request.sequences:
                    sequence.tokens.extend(sequence.expected[:-1])

    def _stopped_within_draft(self, sequence: Sequence, count: int, result: StepResult) -> None:
        """Draft tokens after a sequence's end were not accepted, though the model chose them."""
        outcome = None if result.drafted is None else result.drafted.of.get(sequence)
        if outcome is not None:
            assert result.drafted is not None
            result.drafted.of[sequence] = outcome.ended_after(count)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        params = sequence.request.params
        sequence.tokens.append(sampled.token)
        sequence.cumulative_logprob += sampled.logprob
        if sampled.top is not None:
            sequence.logprobs.append(sampled.top)
        count = len(sequence.tokens) - len(sequence.request.prompt)
        may_stop = count >= params.min_tokens
        if sequence.matcher is not None and sampled.is_allowed:
            sequence.matcher.accept(sampled.token)
        is_end = sampled.token in params.stop_token_ids or (sampled.token in self._ends and not params.ignore_eos)
        # One that comes too soon was all that a grammar allowed.
        is_end = is_end and (may_stop or sequence.matcher is not None)
        keeps = params.include_stop_str_in_output and sampled.token in params.stop_token_ids
        if sequence.text is not None and (keeps or not is_end):
            sequence.text.add(sampled.token, may_stop=may_stop)
        # A grammar that cannot be followed allows nothing but an end.
        failure = None if sequence.matcher is None else sequence.matcher.failure
        if failure is not None:
            sequence.request.error = f"the output's grammar became too complex to follow ({failure})"
            sequence.request.is_invalid = True
            self.end(sequence.request, "error")
        elif not sampled.is_allowed:
            sequence.request.error = "no token can follow: none that the grammar permits is one of allowed_token_ids"
            sequence.request.is_invalid = True
            self.end(sequence.request, "error")
        elif is_end:
            sequence.stop_reason = sampled.token
            self._end(sequence, "stop")
        elif sequence.text is not None and sequence.text.stop_reason is not None:
            sequence.stop_reason = sequence.text.stop_reason
            self._end(sequence, "stop")
        elif sequence.matcher is not None and sequence.matcher.is_complete:
            self._end(sequence, "stop")
        elif count >= sequence.request.max_tokens:
            self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._scheduler.end(sequence, reason)
        if sequence.text is not None:
            sequence.text.end()

    def _write_beams(self, request: Request) -> None:
        if not request.is_finished or self._tokenizer is None:
            return
        params = request.params
        for sequence in request.sequences:
            text = sequence.text = TextStream.of(self._tokenizer, request.prompt, params)
            tokens = sequence.generated
            keeps = params.include_stop_str_in_output and sequence.stop_reason in params.stop_token_ids
            leaves_out = isinstance(sequence.stop_reason, int) and not keeps
            for count, token in enumerate(tokens[:-1] if leaves_out else tokens, start=1):
                text.add(token, may_stop=count >= params.min_tokens)
            text.end()
