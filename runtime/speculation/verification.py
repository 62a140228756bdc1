"""From a draft and the logits that were computed with it to a sequence's next tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from ..requests.sequence import Sequence
from ..sampling.draw import DrawTokens
from ..sampling.logit_statistics import LogitStatistics
from ..sampling.sampling import Sampled, sample, trying
from .counts import DraftOutcome
from .tree import TokenTree


@dataclass(frozen=True)
class Verified:
    """What a draft led to.

    Attributes:
        tokens: at least one; all but the last are the draft's.
        last: the node after which the last one was chosen: that of the one before it.
        reached: the last node whose token was chosen, 0 if none was.
    """

    tokens: list[Sampled]
    last: int
    reached: int


@dataclass(frozen=True)
class VerifiedChain:
    """What a chain led to whose next tokens were chosen already.

    Attributes:
        count: how many of these are the sequence's: all but the last are the chain's.
        outcome: of the draft.
    """

    count: int
    outcome: DraftOutcome

    @classmethod
    def of(cls, chain: SequenceOf[int], chosen: SequenceOf[int], sound: SequenceOf[object]) -> VerifiedChain:
        """Compare a chain with what was chosen.

        Args:
            chain: tokens that might come next.
            chosen: what was chosen before each of them, and after the last.
            sound: whether the logits that it was chosen from are finite; the first ones are.
        """
        right = 0
        while right < len(chain) and sound[right] and chosen[right] == chain[right]:
            right += 1
        # What the next step says of logits that are not sound counts.
        count = right + bool(sound[right])
        return cls(count, DraftOutcome.of(TokenTree(list(chain)), right, cut=not sound[right]))


def verify(
    logits: Tensor,
    stats: LogitStatistics,
    row: int,
    tree: TokenTree,
    sequence: Sequence,
    ends: frozenset[int],
    seed: int,
    draw_tokens: DrawTokens,
) -> Verified:
    """Choose the next tokens of a sequence from logits that were computed with a draft of them.

    Each is chosen as without a draft, from the same logits with the same noise. The draft only says after which tokens logits are
    known: while the chosen token is one of the draft's, there is a next row.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        stats: their statistics.
        row: the one after the sequence's last token; those after each node of the draft follow.
        tree: tokens that may come next.
        sequence: the sequence.
        ends: the model's end tokens.
        seed: of the engine, for requests without one.
        draw_tokens: draws them.
    """
    found: list[Sampled] = []
    children = tree.children()
    node: int | None = 0
    last = reached = 0
    with trying(sequence):
        while node is not None:
            reached = node
            if node > 0 and not stats.is_sound(row + node):
                break  # what the next step says of it counts
            found += sample(logits, stats, [row + node], [sequence], ends, seed, draw_tokens)
            last, token = node, found[-1].token
            node = children.get((node, token)) if found[-1].is_allowed else None
            if node is None:
                break
            reached = node
            sequence.tokens.append(token)
            if sequence.matcher is not None:
                sequence.matcher.accept(token)
                if sequence.matcher.is_complete or sequence.matcher.failure is not None:
                    break
    return Verified(found, last, reached)
