"""Beam search: all beams of a request advance together, sharing the blocks of what they have in common.

The rules are those of transformers with ``early_stopping=False``, so that both find the same sequences.
"""

from __future__ import annotations

from torch import Tensor

from .scheduler import Scheduler, live
from .sequence import Request, Sequence


def continuations(row: Tensor, sequence: Sequence, ends: frozenset[int]) -> list[tuple[float, int]]:
    """A beam's best continuations: total log probability and token, the best first.

    There are enough of them to continue every beam even if the best ones all end.
    """
    params = sequence.request.params
    count = min(max(2, 1 + len(_ends(sequence.request, ends))) * params.beam_width, row.shape[-1])
    best = row.log_softmax(-1).topk(count)
    totals = (best.values + sequence.total_logprob).tolist()
    return list(zip(totals, best.indices.tolist(), strict=True))


def advance(request: Request, scheduler: Scheduler, ends: frozenset[int]) -> bool:
    """Move all beams on by a token, if all of them have continuations to choose from.

    Returns:
        Whether they moved. When the search is over, the request's sequences are its results.
    """
    beams = live(request)
    if any(beam.candidates is None for beam in beams):
        return False
    params = request.params
    width, stops = params.beam_width, _ends(request, ends)
    length = len(beams[0].generated) + 1
    at_limit = length >= request.max_tokens
    choices = sorted(
        ((total, beam, token) for beam in beams for total, token in beam.candidates or ()), key=lambda c: -c[0]
    )[: max(2, 1 + len(stops)) * width]
    for total, beam, token in choices[:width]:
        if token in stops or at_limit:
            _finish(request, total / length**params.length_penalty, total, beam, token, token in stops)
    going_on = [] if at_limit else [choice for choice in choices if choice[2] not in stops][:width]
    # The best that can still come is judged by the length reached, as transformers does.
    hopeless = len(request.finished_beams) == width and (
        not going_on or going_on[0][0] / length**params.length_penalty <= request.finished_beams[-1][0]
    )
    if not going_on or hopeless:
        _conclude(request, scheduler, beams)
    else:
        _continue(request, scheduler, beams, going_on)
    return True


def _ends(request: Request, ends: frozenset[int]) -> frozenset[int]:
    own = frozenset(request.params.stop_token_ids)
    return own if request.params.ignore_eos else own | ends


def _finish(request: Request, score: float, total: float, beam: Sequence, token: int, stopped: bool) -> None:
    result = Sequence(request, 0, [*beam.tokens, token])
    result.total_logprob = total
    result.finish = "stop" if stopped else "length"
    result.stopped_by = token if stopped else None
    request.finished_beams.append((score, result))
    request.finished_beams.sort(key=lambda found: -found[0])
    del request.finished_beams[request.params.beam_width :]


def _continue(
    request: Request, scheduler: Scheduler, beams: list[Sequence], chosen: list[tuple[float, Sequence, int]]
) -> None:
    heirs: dict[Sequence, list[tuple[float, int]]] = {beam: [] for beam in beams}
    for total, beam, token in chosen:
        heirs[beam].append((total, token))
    kept: list[Sequence] = []
    for beam, mine in heirs.items():
        for total, token in mine[1:]:
            child = Sequence(request, 0, [*beam.tokens, token])
            child.total_logprob = total
            scheduler.fork(beam, child)
            kept.append(child)
        if mine:
            beam.total_logprob = mine[0][0]
            beam.tokens.append(mine[0][1])
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
