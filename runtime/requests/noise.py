"""The noise of a sequence's tokens, one draw for each token, whoever asks for it first."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


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
            self._ahead.append(torch.empty(size).exponential_(generator=self._generator))
        return self._ahead[ahead]

    def pass_on(self) -> None:
        """The next token is chosen."""
        self._ahead.popleft()
