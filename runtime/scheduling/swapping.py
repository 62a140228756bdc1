"""Whether a preempted sequence is swapped to host memory or computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .plan import StepPlan

SWAP_MODES = ("auto", "swap", "recompute")
SwapMode = Literal["auto", "swap", "recompute"]
# Steps of fewer tokens read the weights for a few, and say little about the time of a prompt's tokens.
_FEWEST_TOKENS = 32


@dataclass(frozen=True)
class TransferCost:
    """The time to copy cache blocks between device and host memory.

    Attributes:
        block_bytes: of a block, over all layers.
        transfer_bytes: how many of them are contiguous: one transfer.
        seconds_per_transfer: what each transfer takes besides its bytes.
        bytes_per_second: of long transfers.
    """

    block_bytes: int
    transfer_bytes: int
    seconds_per_transfer: float
    bytes_per_second: float

    def seconds(self, blocks: int) -> float:
        """For so many blocks, one way."""
        size = blocks * self.block_bytes
        return -(-size // self.transfer_bytes) * self.seconds_per_transfer + size / self.bytes_per_second


class Swapping:
    """Compares the time of two transfers with that of computing the tokens again, as measured in earlier steps.

    Args:
        mode: ``auto``, or ``swap`` to swap always. A sequence for which host memory has no room is computed again.
        block_size: positions of a block.
        cost: of transfers.
    """

    def __init__(self, mode: SwapMode, block_size: int, cost: TransferCost) -> None:
        self.mode = mode
        self._block_size = block_size
        self.cost = cost
        self.seconds_per_token: float | None = None

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long a prompt's token takes, from a step with many of them and fewer others."""
        prompts = sum(chunk.count for chunk in plan.chunks if chunk.is_prompt)
        if prompts < max(_FEWEST_TOKENS, plan.tokens / 2) or seconds <= 0:
            return
        found = seconds / plan.tokens
        before = self.seconds_per_token
        self.seconds_per_token = found if before is None else 0.8 * before + 0.2 * found

    def pays(self, tokens: int) -> bool:
        """Whether to swap a sequence of so many computed tokens."""
        if tokens == 0 or self.mode == "recompute":
            return False
        if self.mode == "swap":
            return True
        if self.seconds_per_token is None:
            return False
        return 2 * self.cost.seconds(-(-tokens // self._block_size)) < tokens * self.seconds_per_token
