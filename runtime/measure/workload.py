"""Prompts for measurements."""

from __future__ import annotations

import torch


def random_prompt(length: int, vocabulary: int, seed: int) -> list[int]:
    """Random token ids, so that no prefix is shared."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
