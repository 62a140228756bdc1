"""Beam search: all beams of a request advance together and share the blocks of common prefixes.

The rules are those of transformers with ``early_stopping=False``, so that both find the same sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..requests.sequence import BeamCandidate, Request, Sequence
from ..requests.text_stream import TextStream
from ..sampling.beam_candidates import beam_ends
from ..scheduling.scheduler import Scheduler, live


@dataclass(frozen=True)
class _Choice:
    """A beam, one of its candidates, its text with that candidate, and the stop string or token that ends it."""

    beam: Sequence
    candidate: BeamCandidate
    text: TextStream | None
    stop_reason: int | str | None


def advance(request: Request, scheduler: Scheduler, ends: frozenset[int]) -> bool:
    """Advance all beams by a token, if all of them have continuations.

    Returns:
        Whether they advanced. When the search is over, the request's sequences are its results.
    """
    beams = live(request)
    if any(beam.candidates is None for beam in beams):
        return False
    params = request.params
    width, stops = params.beam_width, beam_ends(request, ends)
    length = len(beams[0].generated) + 1
    at_limit = length >= request.max_tokens
    pairs = sorted(
        ((beam, candidate) for beam in beams for candidate in beam.candidates or ()), key=lambda pair: -pair[1].score
    )
    choices = [_chosen(beam, candidate, stops) for beam, candidate in pairs[: max(2, 1 + len(stops)) * width]]
    for choice in choices[:width]:
        if choice.stop_reason is not None or at_limit:
            _finish(request, choice.candidate.score / length**params.length_penalty, choice)
    going_on = [] if at_limit else [choice for choice in choices if choice.stop_reason is None][:width]
    # The best possible remaining score is computed with the current length, as in transformers.
    hopeless = len(request.finished_beams) == width and (
        not going_on or going_on[0].candidate.score / length**params.length_penalty <= request.finished_beams[-1][0]
    )
    if not going_on or hopeless:
        _conclude(request, scheduler, beams)
    else:
        _continue(request, scheduler, beams, going_on)
    return True


def _chosen(beam: Sequence, candidate: BeamCandidate, stops: frozenset[int]) -> _Choice:
    params = beam.request.params
    text = beam.text.fork() if beam.text is not None and params.stop else None
    if candidate.token in stops:
        return _Choice(beam, candidate, text, candidate.token)
    if text is not None:
        text.add(candidate.token, may_stop=len(beam.generated) + 1 >= params.min_tokens)
        return _Choice(beam, candidate, text, text.stop_reason)
    return _Choice(beam, candidate, None, None)


def _finish(request: Request, score: float, choice: _Choice) -> None:
    result = _heir(choice)
    result.finish = "length" if choice.stop_reason is None else "stop"
    result.stop_reason = choice.stop_reason
    request.finished_beams.append((score, result))
    request.finished_beams.sort(key=lambda found: -found[0])
    del request.finished_beams[request.params.beam_width :]


def _heir(choice: _Choice) -> Sequence:
    """A new sequence that continues as chosen."""
    heir = Sequence(choice.beam.request, 0, list(choice.beam.tokens))
    heir.logprobs = list(choice.beam.logprobs)
    heir.cumulative_logprob = choice.beam.cumulative_logprob
    _take(heir, choice)
    return heir


def _take(sequence: Sequence, choice: _Choice) -> None:
    candidate = choice.candidate
    sequence.tokens.append(candidate.token)
    sequence.score = candidate.score
    sequence.cumulative_logprob += candidate.logprob
    if candidate.top is not None:
        sequence.logprobs.append(candidate.top)
    if choice.text is not None:
        sequence.text = choice.text


def _continue(request: Request, scheduler: Scheduler, beams: list[Sequence], chosen: list[_Choice]) -> None:
    heirs: dict[Sequence, list[_Choice]] = {beam: [] for beam in beams}
    for choice in chosen:
        heirs[choice.beam].append(choice)
    kept: list[Sequence] = []
    for beam, mine in heirs.items():
        for choice in mine[1:]:
            child = _heir(choice)
            scheduler.fork(beam, child)
            kept.append(child)
        if mine:
            _take(beam, mine[0])
            beam.candidates = None
            kept.append(beam)
        else:
            scheduler.end(beam, "abort")
    request.sequences = kept


def _conclude(request: Request, scheduler: Scheduler, beams: list[Sequence]) -> None:
    for beam in beams:
        scheduler.end(beam, "abort")
    request.sequences = [sequence for _, sequence in request.finished_beams[: request.params.n]]
    for index, sequence in enumerate(request.sequences):
        sequence.index = index
