"""What the scheduler asks: who may start next, who runs first, and who gives way. Touches no tensor.

A new policy is a class with these three methods and a row of :data:`POLICIES`. What keeps any of them sound stays with the
scheduler: the step's budget, the places, the room in the cache, and that all of a request's sequences get on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice, takewhile
from typing import Protocol

from .sequence import Request, Sequence


class Policy(Protocol):
    """Decides between sequences; one object for each scheduler, which may keep what it needs from step to step."""

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """Those that may start in this step, the first to try first. None is admitted past one that does not fit.

        Args:
            waiting: all that wait, in the order in which they came; those that lost their blocks before all others.
            running: all that run, in the order in which they were admitted.
            places: how many sequences may run at once.
        """
        ...

    def running_order(self, running: list[Sequence]) -> list[Sequence]:
        """All that run, in the order in which they get tokens of a step, and blocks."""
        ...

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """Who gives its blocks to ``sequence``, which lacks some, and is computed again later; ``sequence`` itself, if nobody.

        Whoever comes before ``sequence`` in :meth:`running_order` must not give way: it is in the step already, and the
        first must always get on, or nobody may ever finish.
        """
        ...


class FirstComeFirstServed:
    """Whoever came first starts first, runs first and keeps its blocks the longest."""

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """All, as they came."""
        return waiting

    def running_order(self, running: list[Sequence]) -> list[Sequence]:
        """As they were admitted."""
        return running

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The last behind it, else a beam that waits for it, else itself."""
        order = self.running_order(running)
        if order[-1] is not sequence:
            return order[-1]
        siblings = (s for s in reversed(order) if s.request is sequence.request and s.candidates is not None)
        return next(siblings, sequence)


class StaticBatching(FirstComeFirstServed):
    """The baseline: a batch starts only when the one before has ended: those that wait then, as many as may run."""

    def __init__(self) -> None:
        self._batch: dict[
            int, Request
        ] = {}  # requests are equal when they ask for the same: these are known by identity

    def admissible(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """Those of the batch."""
        if not any(map(self._is_of_batch, [*running, *waiting])):
            self._batch = {id(sequence.request): sequence.request for sequence in islice(waiting, places)}
        return takewhile(self._is_of_batch, waiting)

    def _is_of_batch(self, sequence: Sequence) -> bool:
        return id(sequence.request) in self._batch


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "static": StaticBatching}
