"""The noise of a sequence's tokens, one draw for each token, whoever asks for it first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class Noise(Protocol):
    """What the tokens of one sequence are chosen with."""

    def of(self, ahead: int, size: int) -> Tensor:
        """The noise of a token that is not chosen yet, ``[size]``; 0 for the next one.

        As many tokens as are ``ahead`` must stand in the sequence meanwhile (see :func:`..sampling.sampling.trying`).
        """
        ...

    def pass_on(self) -> None:
        """The next token is chosen."""
        ...


class TokenNoise:
    """Exponential noise for the tokens of one sequence, from its seed.

    A drafter chooses its tokens with the noise that the model's own will be chosen with. So both agree more often than
    by independent draws, and the model's tokens do not depend on what was drafted (Daliri et al., arXiv:2408.07978).

    Args:
        seed: of the sequence.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._ahead: deque[Tensor] = deque()

    def of(self, ahead: int, size: int) -> Tensor:
        """The noise of a token that is not chosen yet, ``[size]``; 0 for the next one."""
        while len(self._ahead) <= ahead:
            self._ahead.append(_exponential(size, self._generator))
        return self._ahead[ahead]

    def pass_on(self) -> None:
        """The next token is chosen."""
        self._ahead.popleft()


def _exponential(size: int, generator: torch.Generator) -> Tensor:
    """Exponential noise, in a third of the time of torch's own; never zero, over which any token would be chosen."""
    coarse, fine = torch.rand(2, size, generator=generator)
    return coarse.add_(fine, alpha=2**-24).clamp_(2**-49, 1 - 2**-24).neg_().log1p_().neg_()


class PhiloxNoise:
    """The noise that :mod:`..kernels.rows.sample_tokens` draws on a GPU, for what is chosen on the host there.

    It depends on nothing but the seed and how many tokens there are.

    Args:
        seed: of the sequence.
        tokens: of the sequence, of which there may be more with each call; those that are tried (of a draft), too.
    """

    def __init__(self, seed: int, tokens: Sequence[int]) -> None:
        self._seed, self._tokens = seed, tokens

    def of(self, ahead: int, size: int) -> Tensor:
        """The noise of the token after the last one."""
        bits = _philox(self._seed, len(self._tokens), -(-size // 4)).flatten()[:size]
        # The upper half counts down from the largest.
        uniform = torch.minimum(bits, _WORD - bits).float() * 4.6566127342e-10 + 2.3283064e-10
        return -torch.log1p(-uniform)

    def pass_on(self) -> None:
        """Nothing: the next one has a token more."""


def _philox(seed: int, length: int, count: int) -> Tensor:
    """Four words of 32 bits for each of the first numbers (Salmon et al., 2011; ten rounds), ``[count, 4]``."""
    a, c = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    b, d = torch.full_like(a, length), torch.zeros_like(a)
    first, second = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        # Products of 64 bits, of which the sign is a bit like the others.
        one, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (other >> 32 & _WORD) ^ b ^ first, other & _WORD
        c, d = (one >> 32 & _WORD) ^ d ^ second, one & _WORD
        first, second = first + 0x9E3779B9 & _WORD, second + 0xBB67AE85 & _WORD
    return torch.stack([a, b, c, d], dim=-1)
