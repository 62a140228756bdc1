"""What speculative decoding gains checkpoints: each load with and without drafts, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_checkpoint
from ...models.text.text_source import TextSource
from ...runtime import EngineConfig
from ...runtime.engine.setup.config import NESTED, is_part
from ...runtime.speculation.counts import DraftCounts
from ...system.progress import Progress
from ...system.storage.digests import digest
from ..results.result import DraftedLoad, DraftedSpeed
from .against import spread_change
from .settings import SpeedSettings
from .speed import spread
from .subject import Subject
from .workers import Worker

_SEED = 5000


@dataclass(frozen=True)
class EvaluatedDrafter:
    """The drafter of an evaluation.

    Attributes:
        name: ``lookup``, ``nested``, ``early-exit:N`` or a checkpoint's, for reports.
        path: the checkpoint's directory, if it is one.
    """

    name: str
    path: Path | None

    @classmethod
    def find(cls, given: str, *, called: str | None = None, trust_remote_code: bool) -> EvaluatedDrafter:
        """What an evaluation's settings name.

        Args:
            given: ``lookup``, ``nested``, ``early-exit:N``, or a checkpoint's directory or hub name.
            called: the checkpoint's name in reports, if another one.
            trust_remote_code: run its own Python.

        Raises:
            SmeltError: there is no such checkpoint.
        """
        if is_part(given):
            return cls(given, None)
        return cls(called or given, find_checkpoint(given, trust_remote_code=trust_remote_code).path)

    @property
    def identity(self) -> str:
        """Says whether a measurement was made with it."""
        if self.path is None:
            return self.name
        checkpoint = Subject(self.name, ModelDirectory(self.name, self.path), "candidate")
        return digest([checkpoint.fingerprint, checkpoint.companions])

    def drafts_for(self, subjects: Sequence[Subject]) -> list[Subject]:
        """The models that are measured with it.

        A checkpoint drafts for the baseline, or without one for all other models; ``nested`` for all but the baseline; all else for all.
        """
        served = [each for each in subjects if each.server is None and each.only_text is None]
        if self.path is None:
            return [each for each in served if each.role != "baseline" or self.name != NESTED]
        others = [each for each in served if each.directory.path.resolve() != self.path.resolve()]
        return [each for each in others if each.role == "baseline"] or others


def measure_drafts(
    subject: Subject,
    drafter: EvaluatedDrafter,
    settings: SpeedSettings,
    text: TextSource,
    engine: EngineConfig,
    progress: Progress,
) -> DraftedSpeed:
    """Measure a checkpoint with and without drafts.

    Args:
        subject: the checkpoint.
        drafter: what drafts for it.
        settings: the loads.
        text: prompts are pieces of it: of random tokens acceptance would mean nothing.
        engine: how it is served.
        progress: shows progress.

    Raises:
        SmeltError: the drafter is of no use to it, or it cannot be served.
    """
    name = drafter.name if drafter.path is None else str(drafter.path)
    options = replace(settings.engine(engine), drafter=name)
    progress.say(f"loading {subject.name} with its drafter")
    asked = sorted(set(settings.concurrency))
    turns: dict[int, list[dict[str, Any]]] = {concurrency: [] for concurrency in asked}
    with Worker(subject.name) as worker:
        worker.ask(
            "load_drafting",
            checkpoint=str(subject.directory.path),
            options=asdict(options),
            text=asdict(text),
            prompt=settings.prompt,
        )
        order = [(repeat, concurrency) for repeat in range(settings.repeats) for concurrency in asked]
        for repeat, concurrency in progress.track(order, f"measuring {subject.name} with and without drafts"):
            found = worker.ask(
                "drafts_of",
                prompt=settings.prompt,
                generate=settings.generate,
                concurrency=concurrency,
                seed=_SEED * (repeat + 2) * (concurrency + 1),
                drafts_first=bool(repeat % 2),
            )
            turns[concurrency].append(found)
    loads = [_load(concurrency, found) for concurrency, found in turns.items()]
    return DraftedSpeed(drafter=drafter.name, prompt=settings.prompt, generate=settings.generate, loads=loads)


def _load(concurrency: int, turns: list[dict[str, Any]]) -> DraftedLoad:
    alone, drafted = (spread([turn[name] for turn in turns]) for name in ("alone", "drafted"))
    counts = DraftCounts()
    for turn in turns:
        counts = counts.with_those_of(DraftCounts(**turn["counts"]))
    return DraftedLoad(
        concurrency=concurrency,
        alone=alone,
        drafted=drafted,
        speedup=spread_change(alone, drafted, paired=True),
        accepted=counts.acceptance,
        accepted_by_position=counts.by_position(),
        tokens_per_verification=counts.tokens_per_verification,
        requests=concurrency * len(turns),
        same_answers=sum(turn["same"] for turn in turns),
    )
