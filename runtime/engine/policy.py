"""Scheduling policies: which requests start next, which run first, and which are preempted. Touches no tensor.

A new policy is a class with these three methods and a row of :data:`POLICIES`. The scheduler enforces the invariants of all
policies: the token budget, the number of sequences, the cache's capacity, and progress of all sequences of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice, takewhile
from typing import Protocol

from .sequence import Request, Sequence


class Policy(Protocol):
    """Orders sequences; one object per scheduler, which may keep state between steps."""

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """The sequences that may start in this step, in order. None is admitted past one that does not fit.

        Args:
            waiting: all waiting sequences in order of arrival; preempted ones first.
            running: all running sequences, in the order in which they were admitted.
            places: the most sequences that run at once.
        """
        ...

    def running_order(self, running: list[Sequence]) -> list[Sequence]:
        """All running sequences, in the order in which they get a step's tokens and blocks."""
        ...

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The sequence to preempt for ``sequence``, which lacks blocks, and to recompute later; ``sequence`` itself if there is none.

        Sequences before ``sequence`` in :meth:`running_order` must not be preempted: they are in the step already, and the
        first must always progress, or no request might ever finish.
        """
        ...


class FirstComeFirstServed:
    """The earliest request starts first, runs first and keeps its blocks the longest."""

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """All, in order of arrival."""
        return waiting

    def running_order(self, running: list[Sequence]) -> list[Sequence]:
        """In the order in which they were admitted."""
        return running

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The last one after it, else a beam that waits for it, else itself."""
        order = self.running_order(running)
        if order[-1] is not sequence:
            return order[-1]
        siblings = (s for s in reversed(order) if s.request is sequence.request and s.candidates is not None)
        return next(siblings, sequence)


class StaticBatching(FirstComeFirstServed):
    """The baseline: a batch of waiting sequences starts only when the previous one has ended."""

    def __init__(self) -> None:
        self._batch: dict[int, Request] = {}  # requests with equal fields compare equal, so these are kept by identity

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """The sequences of the batch."""
        if not any(map(self._is_of_batch, [*running, *waiting])):
            self._batch = {id(sequence.request): sequence.request for sequence in islice(waiting, places)}
        return takewhile(self._is_of_batch, waiting)

    def _is_of_batch(self, sequence: Sequence) -> bool:
        return id(sequence.request) in self._batch


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "static": StaticBatching}
