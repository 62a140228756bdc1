"""The policies by the names that ``Engine(policy=…)`` and ``--policy`` take."""

from __future__ import annotations

from collections.abc import Callable

from ..policy import Policy
from .deadline import EarliestDeadlineFirst
from .fcfs import FirstComeFirstServed
from .mlfq import SkipJoinFeedbackQueue
from .orca import IterationLevel
from .prefill_first import PrefillFirst
from .priority import PriorityOrder
from .sarathi import DecodeMaximal
from .shortest import ShortestPredicted
from .static import StaticBatching

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "static": StaticBatching,
    "orca": IterationLevel,
    "prefill_first": PrefillFirst,
    "sarathi": DecodeMaximal,
    "priority": PriorityOrder,
    "deadline": EarliestDeadlineFirst,
    "shortest": ShortestPredicted,
    "mlfq": SkipJoinFeedbackQueue,
}
