"""The last hidden states of whole prompts, which embeddings and evaluation read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .model import Model
from .parts.batch import Run

_BLOCK = 16


def prompt_states(
    model: Model, prompts: list[list[int]], *, budget: int | None = None, adapter: str | None = None
) -> Iterator[Tensor]:
    """The last hidden states of prompts, in a cache of their own. Of several ranks all call it.

    Args:
        model: the decoder.
        prompts: of one length.
        budget: how many tokens of each are computed at a time; None for all.
        adapter: that changes the model for them; None for none.

    Yields:
        ``[prompts, tokens, width]`` after each piece, on the rank that samples; on others nothing of use.
    """
    length = len(prompts[0])
    each = -(-length // (_BLOCK * model.context.count))
    store = model.keys_values(len(prompts) * each, _BLOCK, model.dtype)
    budget = budget or length
    for start in range(0, length, budget):
        runs = [
            Run(prompt[start : start + budget], start, list(range(i * each, (i + 1) * each)), length, 0, adapter)
            for i, prompt in enumerate(prompts)
        ]
        found = model.states(model.batch(runs, _BLOCK), store)
        yield found.view(len(prompts), -1, found.shape[-1]) if len(found) else found
