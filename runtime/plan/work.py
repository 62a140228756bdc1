"""The steps that a plan's figures are of."""

from __future__ import annotations

from ..costs.work import StepCost, StepWork


def decode_work(sequences: int, context: int) -> StepWork:
    """A step that adds a token to each sequence."""
    cached = sequences * context
    return StepWork(sequences, sequences, cached, cached, chunks=sequences)


def prompt_work(start: int, count: int, *, ends: bool) -> StepWork:
    """A step that computes so many tokens of one prompt.

    Args:
        start: its first token.
        count: how many tokens.
        ends: whether the prompt ends with it.
    """
    pairs = count * start + count * (count + 1) // 2
    return StepWork(count, int(ends), start + count, pairs, 0, 1, 1, pairs)


def first_token_seconds(cost: StepCost, prompt: int, budget: int) -> float:
    """The time of a prompt, alone, in chunks of so many tokens."""
    found = 0.0
    for start in range(0, prompt, budget):
        count = min(budget, prompt - start)
        found += cost.seconds(prompt_work(start, count, ends=start + count == prompt))
    return found
