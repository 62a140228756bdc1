"""The noise that tokens are chosen with, from a seed, the number of tokens so far and the token of the vocabulary.

It depends on nothing else. So a request's tokens are the same wherever they are chosen, also after it was preempted, and a
drafter chooses its tokens with the noise that the model's own will be chosen with: both agree more often than by independent
draws, and the model's tokens do not depend on what was drafted (Daliri et al., arXiv:2408.07978).
:mod:`smelt.runtime.kernels.rows.draw_narrowly` and the CPU's kernels draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def exponential(seed: int, length: int, size: int) -> Tensor:
    """Exponential noise of a whole vocabulary, ``[size]``; never zero, over which any token would be chosen.

    Args:
        seed: of the sequence.
        length: how many tokens the sequence has.
        size: of the vocabulary.
    """
    return _of_bits(_philox(seed, length, torch.arange(-(-size // 4))).flatten()[:size])


def exponential_of(seed: int, length: int, tokens: Tensor) -> Tensor:
    """The same of some tokens."""
    return _of_bits(_philox(seed, length, tokens >> 2).gather(-1, (tokens & 3)[:, None])[:, 0])


def _of_bits(bits: Tensor) -> Tensor:
    # The upper half counts down from the largest.
    uniform = torch.minimum(bits, _WORD - bits).float() * 4.6566127342e-10 + 2.3283064e-10
    return -torch.log1p(-uniform)


def _philox(seed: int, length: int, numbers: Tensor) -> Tensor:
    """Four words of 32 bits for each number (Salmon et al., 2011; ten rounds), ``[numbers, 4]``."""
    a, c = numbers, torch.zeros_like(numbers)
    b, d = torch.full_like(a, length), torch.zeros_like(a)
    first, second = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        # Products of 64 bits, of which the sign is a bit like the others.
        one, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (other >> 32 & _WORD) ^ b ^ first, other & _WORD
        c, d = (one >> 32 & _WORD) ^ d ^ second, one & _WORD
        first, second = first + 0x9E3779B9 & _WORD, second + 0xBB67AE85 & _WORD
    return torch.stack([a, b, c, d], dim=-1)
