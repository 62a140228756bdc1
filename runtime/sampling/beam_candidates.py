"""The tokens with which a beam may go on."""

from __future__ import annotations

import math

from torch import Tensor

from ..requests.sequence import BeamCandidate, Request, Sequence
from .sampling import changed_logits


def continuations(row: Tensor, sequence: Sequence, ends: frozenset[int]) -> list[BeamCandidate]:
    """A beam's best continuations, the best first.

    There are enough to continue every beam even if the best ones all end, where as many tokens are allowed. Biases and penalties change
    the log probabilities that score beams, as in transformers.
    """
    params = sequence.request.params
    count = min(max(2, 1 + len(beam_ends(sequence.request, ends))) * params.beam_width, row.shape[-1])
    logprobs = row.log_softmax(-1)
    best = changed_logits(logprobs, sequence, ends).topk(count)
    own = logprobs[best.indices].tolist()
    likely = None if params.logprobs is None else logprobs.topk(params.logprobs)
    top = None if likely is None else dict(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
    return [
        BeamCandidate(token, sequence.score + change, logprob, None if top is None else {**top, token: logprob})
        for change, token, logprob in zip(best.values.tolist(), best.indices.tolist(), own, strict=True)
        if change != -math.inf
    ]


def beam_ends(request: Request, ends: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request's beams, of those that end any sequence and its own."""
    own = frozenset(request.params.stop_token_ids)
    return own if request.params.ignore_eos else own | ends
