"""Prompts for measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...models.text.text_source import TextSource
from ...models.text.windows import token_pieces

# From a length and a seed.
PromptMaker = Callable[[int, int], list[int]]


def random_prompt(length: int, vocabulary: int, seed: int) -> list[int]:
    """Random token ids, so that no prefix is shared."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text_prompts(tokenizer: Any, longest: int, source: TextSource | None = None) -> PromptMaker:
    """Pieces of a text, for drafters, whose acceptance on random tokens would mean nothing.

    Args:
        tokenizer: the model's.
        longest: the most tokens of a prompt.
        source: of the text; Smelt's evaluation text if None.
    """
    tokens: list[int] = []
    for piece in token_pieces(source or TextSource("builtin", "evaluation"), tokenizer):
        tokens += piece
        if len(tokens) > 200 * longest:
            break

    def prompt(length: int, seed: int) -> list[int]:
        start = torch.randint(0, max(1, len(tokens) - length), (1,), generator=torch.Generator().manual_seed(seed))
        piece = tokens[int(start) :][:length]
        return (piece * -(-length // len(piece)))[:length]

    return prompt
