"""What the first rank and the others tell each other."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Self

import torch

from ....system.errors import RuntimeProblem, SmeltError
from ....system.hardware.device import device_named
from ....system.processes.child_processes import OtherProcesses
from ...decoder.parts.batch import Run
from ...parallel.launch import joined_by_environment, launched_count, started
from ...parallel.ranks import RankLost, Ranks
from ...parallel.stages import RankPlace, divided
from ...scheduling.plan import StepPlan
from ...weights.checkpoint import Checkpoint
from ..setup.config import EngineConfig
from .reserve import share_of

_LOG = logging.getLogger(__name__)
_MODULE = "smelt.runtime.engine.ranks.worker"
_LIBRARIES = ("smelt", "torch", "transformers", "compressed-tensors")
# Most steps fit into the first message; a longer one has a second.
_FIRST = 1024
_STOP = -1
_STEP, _STATES = range(2)
_END_SECONDS = 2.0
_LOOK_SECONDS = 0.5

Take = Callable[[int], list[int]]


@dataclass(frozen=True)
class StepMessage:
    """What a rank needs to compute its share of a step.

    Attributes:
        runs: the tokens.
        drafts: whether a part of the model computes them that drafts, instead of the model.
        plan: with the blocks to move before; its chunks are empty.
    """

    runs: list[Run]
    drafts: bool = False
    plan: StepPlan = field(default_factory=lambda: StepPlan([]))

    def numbers(self) -> list[int]:
        """As numbers."""
        numbers = [_STEP, self.drafts]
        for pairs in (self.plan.swap_out, self.plan.swap_in, self.plan.copies):
            numbers += [len(pairs), *(each for pair in pairs for each in pair)]
        numbers.append(len(self.runs))
        for run in self.runs:
            numbers += [
                run.start,
                run.grows_to,
                run.wants,
                run.decodes,
                len(run.tokens),
                len(run.blocks),
                len(run.also),
            ]
            numbers += [*run.tokens, *run.blocks, *(each for pair in run.also for each in pair)]
        return numbers

    @classmethod
    def of(cls, take: Take) -> Self:
        """From these numbers."""
        drafts, moved = bool(take(1)[0]), []
        for _ in range(3):
            flat = take(2 * take(1)[0])
            moved.append(list(zip(flat[::2], flat[1::2], strict=True)))
        runs = []
        for _ in range(take(1)[0]):
            start, grows_to, wants, decodes, tokens, blocks, also = take(7)
            run = Run(take(tokens), start, take(blocks), grows_to, wants, decodes=bool(decodes))
            runs.append(replace(run, also=tuple((take(1)[0], take(1)[0]) for _ in range(also))))
        return cls(runs, drafts, StepPlan([], swap_out=moved[0], swap_in=moved[1], copies=moved[2]))


@dataclass(frozen=True)
class StatesMessage:
    """What a rank needs to compute its share of prompts' hidden states, beside the engine's requests.

    Attributes:
        prompts: of one length.
        budget: how many tokens of each are computed at a time.
    """

    prompts: list[list[int]]
    budget: int

    def numbers(self) -> list[int]:
        """As numbers."""
        tokens = [token for prompt in self.prompts for token in prompt]
        return [_STATES, self.budget, len(self.prompts), len(self.prompts[0]), *tokens]

    @classmethod
    def of(cls, take: Take) -> Self:
        """From these numbers."""
        budget, count, length = take(3)
        return cls([take(length) for _ in range(count)], budget)


def received(ranks: Ranks) -> StepMessage | StatesMessage | None:
    """What the first rank wants to be computed; None if it stops."""
    count, *numbers = ranks.broadcast(torch.zeros(_FIRST, dtype=torch.int64)).tolist()
    if count == _STOP:
        return None
    if count >= _FIRST:
        numbers += ranks.broadcast(torch.zeros(count - _FIRST + 1, dtype=torch.int64)).tolist()
    left = iter(numbers)

    def take(count: int) -> list[int]:
        return [next(left) for _ in range(count)]

    return {_STEP: StepMessage, _STATES: StatesMessage}[take(1)[0]].of(take)


class FailedTogether(RuntimeProblem):
    """Some rank could not load its share, which the first one says."""


@contextmanager
def each_loaded(ranks: Ranks, *, together: bool = False) -> Iterator[None]:
    """If some rank fails within, all do, and say why.

    Args:
        ranks: all of them.
        together: whether they compute together within. A failure amid that ends the process, so that the others do not wait for it.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # without memory, for one: the others wait for what this one would have said
        if together and not isinstance(error, SmeltError):
            raise
        own = error
    kind = "" if own is None or isinstance(own, SmeltError) else f"{type(own).__name__}: "
    said = ranks.gather_data(None if own is None else f"{kind}{own}")
    found: dict[str, list[str]] = {}
    for rank, problem in enumerate(said):
        if problem is not None:
            found.setdefault(problem, []).append(f"rank {rank}")
    if own is not None and (not isinstance(own, SmeltError) or (ranks.rank == 0 and len(found) == 1)):
        raise own
    if found:
        text = "; ".join(f"{' and '.join(which)}: {problem}" for problem, which in found.items())
        raise (RuntimeProblem if ranks.rank == 0 else FailedTogether)(text)


def least(ranks: Ranks, count: int) -> int:
    """The smallest of all ranks' numbers."""
    return min(ranks.gather_data(count))


def check_same(ranks: Ranks, opened: Checkpoint) -> None:
    """See to it that all ranks have the same libraries and the same checkpoint.

    Raises:
        RuntimeProblem: one has others.
    """
    if ranks.count == 1:
        return
    for library in _LIBRARIES:
        ranks.agree(f"a version of {library}", version(library))
    config = json.dumps(opened.directory.config_data(), sort_keys=True)
    ranks.agree("a checkpoint", opened.weights.fingerprint() + config)


def kind(config: EngineConfig) -> str:
    """The kind of device that ranks compute on."""
    return config.device.partition(":")[0]


def here(config: EngineConfig) -> EngineConfig:
    """A rank's configuration: of several GPUs each takes one."""
    return replace(config, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}") if config.device == "cuda" else config


def on_gpu(config: EngineConfig) -> None:
    """Let NCCL use this rank's GPU, if the ranks compute on GPUs."""
    if kind(config) == "cuda":
        torch.cuda.set_device(here(config).device)


class Workers:
    """The other ranks, as the first one sees them.

    Args:
        ranks: that are connected.
        others: their processes, if this one has started them.
        threads: that this process had for itself, and gets again.
        step_timeout: the seconds after which a step is given up, as some rank does not answer.

    Attributes:
        place: this rank's.
    """

    place: RankPlace

    def __init__(self, ranks: Ranks, others: OtherProcesses, threads: int, step_timeout: float) -> None:
        self.ranks = ranks
        self._others = others
        self._problem: str | None = None
        self._moves = StepPlan([])
        self._lock, self._computing = threading.Lock(), threading.Lock()
        self._closed = False
        self._threads = threads
        self._timeout, self._step_began = step_timeout, math.inf

    @classmethod
    def of(cls, checkpoint: Path, config: EngineConfig) -> tuple[Self, EngineConfig]:
        """Start the ranks of an engine, or find those that a launcher has started, and tell them what to load.

        Returns:
            They, and the configuration of each rank's part.

        Raises:
            RuntimeProblem: they cannot start, or a launcher has started another number of them.
        """
        if ":" in config.device:
            raise RuntimeProblem(
                f"device is {config.device}, but {config.division}, and each process takes a GPU; set it to cuda"
            )
        launched, device = launched_count(), kind(config)
        if launched not in (1, config.ranks):
            raise RuntimeProblem(f"{config.division}, but {launched} processes were launched; start {config.ranks}")
        if device == "cuda" and launched == 1:
            device_named(f"cuda:{config.ranks - 1}")  # each takes a GPU
        on_gpu(config)
        if launched == 1:
            ranks, others = started(_MODULE, config.ranks, device)
        else:
            ranks, others = joined_by_environment(device), OtherProcesses([])

        def when_lost() -> None:
            # gloo may wait for ever to send to a process that ended at that moment.
            ranks.close()
            if _LOG.hasHandlers():  # a server that nobody asks anything; commands say it themselves
                _LOG.error("%s, and a model on several ranks needs all; start again", others.lost())

        others.watch(when_lost)
        before = torch.get_num_threads()
        threads = max(1, before // config.ranks)
        if device == "cpu":
            config = share_of(config, config.ranks)  # they are on one machine
            torch.set_num_threads(threads)
        given = {"checkpoint": str(checkpoint.absolute()), "config": asdict(config), "threads": threads}
        found = cls(ranks, others, before, config.step_timeout)
        if device == "cuda":
            threading.Thread(target=found._time_steps, name="smelt-step-timeout", daemon=True).start()
        with found.watched():
            ranks.broadcast_data(given)
            found.place = divided(ranks, config.tp, config.pp, config.cp)
        return found, here(config)

    def move(self, plan: StepPlan) -> None:
        """Blocks that they are to move before they compute the next tokens, all at once: of copies none may depend on another."""
        found = self._moves
        self._moves = replace(
            found,
            swap_out=found.swap_out + plan.swap_out,
            swap_in=found.swap_in + plan.swap_in,
            copies=found.copies + plan.copies,
        )

    def compute_runs(self, runs: list[Run], *, drafts: bool = False) -> None:
        """Let them compute their share of some tokens.

        Args:
            runs: the tokens.
            drafts: whether a part of the model computes them that drafts.
        """
        message = StepMessage(runs, drafts, self._moves)
        self._moves = StepPlan([])
        self.compute(message)

    def compute(self, wanted: StepMessage | StatesMessage) -> None:
        """Let them compute their share."""
        self.ranks.limit(self._timeout)
        self._step_began = time.monotonic()
        numbers = wanted.numbers()
        padded = [len(numbers), *numbers[: _FIRST - 1], *[0] * (_FIRST - 1 - len(numbers))]
        self.ranks.broadcast(torch.tensor(padded))
        if len(numbers) >= _FIRST:
            self.ranks.broadcast(torch.tensor(numbers[_FIRST - 1 :]))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the other ranks wait for this one, which computes with the threads of all."""
        share = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(share)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it all ranks compute together: if that fails, none can go on, and they are ended.

        Raises:
            RuntimeProblem: a rank has ended, now or before.
        """
        if self._problem is not None:
            raise RuntimeProblem(self._problem)
        try:
            with self._computing:
                yield
            # On a GPU what was waited for may be over because it was aborted.
            if self.ranks.is_closed and not self._closed:
                raise RankLost("another rank has ended")
        except BaseException as error:
            why = (
                "an interrupt came while they computed" if isinstance(error, KeyboardInterrupt) else "a rank has failed"
            )
            late = self._is_late()
            if late:
                why = f"a rank has not answered within {self._timeout:g} seconds (step_timeout)"
            seconds = _END_SECONDS if isinstance(error, RankLost) and not late else 0.0
            which = self._others.lost(seconds) or why
            self._problem = f"{which}, and a model on several ranks needs all; start again"
            self._closed = True
            torch.set_num_threads(self._threads)
            self.ranks.close()
            self._others.end(0)
            if isinstance(error, RankLost):
                raise RuntimeProblem(self._problem) from None
            raise
        finally:
            self._step_began = math.inf

    def _time_steps(self) -> None:
        # What is on a GPU is not waited for by torch's groups, but where its results are read.
        while not self._closed:
            time.sleep(_LOOK_SECONDS)
            if self._is_late():
                self.ranks.close()
                return

    def _is_late(self) -> bool:
        return time.monotonic() - self._step_began > self._timeout

    @property
    def problem(self) -> str | None:
        """Why they cannot go on; None if they can."""
        return self._problem or self._others.lost()

    def close(self) -> None:
        """Stop them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        torch.set_num_threads(self._threads)
        # One that computes cannot be stopped; it is ended.
        if self._computing.acquire(timeout=_END_SECONDS):
            try:
                with suppress(RankLost):
                    self.ranks.broadcast(torch.tensor([_STOP, *[0] * (_FIRST - 1)]))
                    self.ranks.end()
            finally:
                self._computing.release()
            self._others.end()
        self._others.end(0)
