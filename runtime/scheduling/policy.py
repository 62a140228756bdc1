"""What the scheduler asks a policy.

A new policy is a file with a subclass of :class:`FirstComeFirstServed` or of another policy, and a row of
:data:`~smelt.runtime.scheduling.policies.table.POLICIES`. The scheduler enforces the invariants of all policies: the token budget, the number of
sequences, the cache's capacity, and progress of all sequences of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from ..requests.sequence import Sequence
from .plan import StepPlan


class Policy(Protocol):
    """Orders sequences; one object per scheduler, which may keep state between steps.

    Attributes:
        pauses: whether running sequences that find no place in a step keep their blocks and go on later, so that more run than
            a step has places for. If not, each that runs has a place until it ends or is preempted.
        swaps_ahead: whether paused sequences are swapped to host memory before others need their blocks.
    """

    @property
    def pauses(self) -> bool: ...

    @property
    def swaps_ahead(self) -> bool: ...

    def begin(self, now: float) -> None:
        """A step is about to be scheduled.

        Args:
            now: the time in seconds, from any origin.
        """
        ...

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """All running sequences, and those that may start, in the order in which they get a step's tokens and blocks.

        None starts past one that waits and does not fit.

        Args:
            waiting: all waiting sequences in order of arrival; preempted ones first.
            running: all running sequences, in the order in which they were admitted.
            places: the most sequences in a step.
        """
        ...

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """How many of a sequence's remaining tokens to compute in this step; 0 for none.

        Args:
            sequence: running, or about to start; it has remaining tokens.
            budget: what is left of the step's token budget; at least 1.
            plan: the step so far.
            most: the whole token budget.
        """
        ...

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The sequence to preempt for ``sequence``, which runs and lacks blocks; ``sequence`` itself if there is none.

        Args:
            sequence: the next one in :meth:`order`.
            running: those that are not in the step yet, ``sequence`` among them.
        """
        ...

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """The running sequence to preempt so that ``sequence``, which waits and lacks blocks, can start; None to let it wait.

        Args:
            sequence: the next one in :meth:`order`.
            running: those that are not in the step yet.
        """
        ...

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """A step has run.

        Args:
            plan: the step.
            seconds: how long it took.
        """
        ...
