"""What a drafter computes before it can draft for a sequence: how long that takes, and whether it is worth it. Touches no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from ..requests.sequence import Sequence

# Tokens that a drafter may compute first for a draft that is only tried, as part of its steps.
_FEW = 16
# The share of all time that more of them may take for a try.
_MOST_TRYING = 0.01
# The share of all time that preparing may cost more than drafts then gain, and so many seconds besides: what it costs comes first.
_MOST_LOST, _AT_ONCE = 0.02, 1.0
# How fast known answers are forgotten.
_KEPT = 0.95


class Preparing:
    """Whether to prepare for a sequence: by what drafts gain, by how long answers are, and by what came of it before.

    Args:
        unprepared: how many of a sequence's tokens would have to be computed first.
    """

    def __init__(self, unprepared: Callable[[Sequence], int]) -> None:
        self._unprepared = unprepared
        self._per_token: float | None = None
        self._answers = self._answered = 0.0  # how many ended, and their tokens
        self._lost = 0.0  # seconds of preparing that no draft has gained since, and that may not be lost
        self._unused = 0.0  # seconds since it was last prepared for more than few tokens

    def seconds(self, sequence: Sequence, guess: float) -> float:
        """How long it takes.

        Args:
            sequence: the sequence.
            guess: seconds of a token, as long as nothing was measured.
        """
        return self._unprepared(sequence) * (guess if self._per_token is None else self._per_token)

    def pays(self, sequence: Sequence, gain: float, guess: float) -> bool:
        """Whether what is to be drafted gains more than it takes.

        Args:
            sequence: the sequence.
            gain: seconds that drafts save for each of its tokens.
            guess: as in :meth:`seconds`.
        """
        takes = self.seconds(sequence, guess)
        left = sequence.request.grows_to - len(sequence.tokens)
        if self._answers:  # most answers end long before they must
            left = min(left, self._answered / self._answers)
        return takes <= gain * left and (self._lost <= _AT_ONCE or self._unprepared(sequence) <= _FEW)

    def tried(self, sequences: SequenceOf[Sequence], guess: float) -> list[bool]:
        """For which of some sequences a draft may be tried, whether it pays or not: those that are ready, or else the readiest.

        Args:
            sequences: the sequences.
            guess: as in :meth:`seconds`.
        """
        counts = [self._unprepared(sequence) for sequence in sequences]
        ready = [count <= _FEW for count in counts]
        if not any(ready) and self._lost <= _AT_ONCE:
            readiest = min(range(len(counts)), key=counts.__getitem__)
            ready[readiest] = self.seconds(sequences[readiest], guess) <= _MOST_TRYING * self._unused
        return ready

    def passed(self, seconds: float) -> None:
        """So much time has passed, some of which may have been lost."""
        self.gained(_MOST_LOST * seconds)
        self._unused += seconds

    def learn(self, prepared: int, seconds: float) -> None:
        """So many tokens were computed."""
        if prepared:
            self._lost += seconds
        if prepared > _FEW:  # fewer take as long as a step
            self._unused = 0.0
            each = seconds / prepared
            self._per_token = each if self._per_token is None else (self._per_token + each) / 2

    def gained(self, seconds: float) -> None:
        """So much did drafts save."""
        self._lost = max(0.0, self._lost - seconds)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        """Learn how long the answers are of those that have ended."""
        for sequence in sequences:
            if sequence.finish in ("stop", "length"):
                self._answers = self._answers * _KEPT + 1
                self._answered = self._answered * _KEPT + len(sequence.tokens) - len(sequence.request.prompt)

    def begin_load(self) -> None:
        """Forget what was lost."""
        self._lost = self._unused = 0.0
