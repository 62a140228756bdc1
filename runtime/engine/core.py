"""An engine's requests, and the loop between its scheduler and its executor that computes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...system.errors import RuntimeProblem
from ...system.interrupts import waiting_interrupts
from ..requests.deadlines import Deadlines
from ..requests.output import RequestOutput
from ..requests.sequence import Request
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler
from ..speculation.fixed_length import FixedDrafts
from .executors.executor import Executor, StepHandle, StepResult
from .recorder import Recorder

Sink = Callable[[RequestOutput], object]


class EngineCore:
    """Schedules the requests that it was given, has their steps computed and hands out what came of them.

    Args:
        scheduler: of its requests.
        executor: computes steps.
        drafting: how many tokens are drafted, and what becomes of them; None without a drafter.
        ends: the model's end tokens.
        tokenizer: for texts; None if the model has none.
        problem: says why nothing can be computed any more; None if it can.

    Attributes:
        scheduler, executor, drafting: the same.
        lock: held during a step, and by whoever changes what steps compute with.
        on_step: called with the plan of each step before it runs; None by default.
        requests: those that are not finished, by id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        drafting: FixedDrafts | None,
        *,
        ends: frozenset[int],
        tokenizer: Any,
        problem: Callable[[], str | None],
    ) -> None:
        self.scheduler, self.executor, self.drafting = scheduler, executor, drafting
        self.lock = threading.RLock()
        self.on_step: Callable[[StepPlan], object] | None = None
        self.requests: dict[str, Request] = {}
        self._ends, self._tokenizer, self._problem = ends, tokenizer, problem
        self._handle: tuple[StepPlan, StepHandle] | None = None
        self._unreturned: dict[str, RequestOutput] = {}  # the latest of each request
        self._awaited: set[str] = set()  # requests whose tokens are needed before the next step is scheduled
        self._sinks: dict[str, Sink] = {}
        self._deadlines = Deadlines(self.requests)

    def submit(self, request: Request, sink: Sink | None) -> None:
        """Queue a checked request.

        Args:
            request: with an id of its own.
            sink: gets its outputs, besides whoever calls :meth:`step`; None for nobody.

        Raises:
            RuntimeProblem: another one with its id is not finished.
        """
        with self.lock:
            if request.id in self.requests:
                raise RuntimeProblem(f"a request named {request.id!r} is running already; choose another id")
            self.requests[request.id] = request
            if not self.executor.runs_ahead(request):
                self._awaited.add(request.id)
            if sink is not None:
                self._sinks[request.id] = sink
            request.arrived = request.arrived or time.perf_counter()
            self._deadlines.add(request)
            # It may have waited for the step that was running.
            self.scheduler.add(request.sequences[0], request.arrived)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the state of every request that progressed, also in what :meth:`advance` computed since the last call.

        An interrupt is raised when the step is complete, so that steps can go on; the next call returns what no sink got, too.
        """
        with waiting_interrupts(), self.lock:
            outputs = {**self._unreturned, **{output.request_id: output for output in self._step()}}
        with self.lock:
            for id, output in outputs.items():
                if self._unreturned.get(id) is output:  # or another thread has computed more
                    del self._unreturned[id]
        return list(outputs.values())

    def advance(self) -> None:
        """Compute one step for those who gave sinks; what others would get, the next :meth:`step` returns."""
        with waiting_interrupts(), self.lock:
            self._step()

    def abort(self, id: str) -> None:
        """Abort a request; a no-op if it has finished."""
        with self.lock:
            request = self.requests.get(id)
            if request is not None:
                self._end(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished, or has outputs that :meth:`step` has not returned."""
        return bool(self.requests or self._unreturned)

    def _step(self) -> list[RequestOutput]:
        handle, changed, started = self._handle, [], None
        try:
            # A step may start before the previous one has returned its tokens, if they are not needed in between.
            if self._awaited:
                changed += self._collect()
            changed += self._expire(time.perf_counter())
            started = self._started(self.scheduler.schedule(time.perf_counter()))
            changed += self._collect()
            self._handle = started
            if started is not None and started[1].completed:
                changed += self._collect()
        except BaseException:
            self._handle = None
            self._fail_all(self._problem() or "the engine failed while computing this request's step")
            # Blocks that the step was to fill or to swap can be found by their keys already.
            self.scheduler.cache.forget()
            raise
        if handle is None and started is None and not changed and self.scheduler.has_work:
            # Requests are checked to fit, so this would be a bug; better than looping forever.
            self._fail_all("this request cannot be scheduled")
            raise RuntimeProblem("no waiting request fits into the cache; this is a bug in Smelt, please report it")
        outputs = [RequestOutput.of(request) for request in {request.id: request for request in changed}.values()]
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                self._unreturned[output.request_id] = output
            else:
                sink(output)
            if output.finished:
                self._forget(output.request_id)
        return outputs

    def _expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed."""
        late = self._deadlines.passed(now)
        for request in late:
            self._recorder.end(request, "deadline")
        return late

    def _started(self, plan: StepPlan) -> tuple[StepPlan, StepHandle] | None:
        """Start a step; None if it is empty."""
        if not plan.chunks:
            return None
        if self.on_step is not None:
            self.on_step(plan)
        self.scheduler.started(plan)
        return plan, self.executor.execute(plan)

    def _collect(self) -> list[Request]:
        """Wait for the started step and record its results; returns the requests that progressed."""
        if self._handle is None:
            return []
        (plan, handle), self._handle = self._handle, None
        return self._commit(plan, handle.collect())

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Record a step's results; returns the requests that progressed."""
        self.scheduler.commit(plan, time.perf_counter(), result.replaced)
        changed = self._recorder.record(plan, result)
        if self.drafting is not None and result.drafted is not None:
            self.drafting.ran(plan, result.drafted, time.perf_counter())
        return changed

    @property
    def _recorder(self) -> Recorder:
        return Recorder(self.scheduler, self._ends, self._tokenizer)

    def _fail_all(self, sentence: str) -> None:
        for request in list(self.requests.values()):
            request.error = sentence
            self._end(request, "error")

    def _end(self, request: Request, reason: str) -> None:
        self._recorder.end(request, reason)
        sink = self._sinks.get(request.id)
        output = None if sink is None else RequestOutput.of(request)
        self._forget(request.id)
        if sink is not None and output is not None:
            sink(output)

    def _forget(self, id: str) -> None:
        request = self.requests.pop(id, None)
        if request is not None:
            # They refer to each other, and the garbage collector, which counts objects and not bytes, would come for them much later.
            request.sequences.clear()
        self._awaited.discard(id)
        self._sinks.pop(id, None)
