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
from ...runtime.engine.setup.config import NESTED, draft_checkpoint, sources_of
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
        name: ``lookup``, ``nested``, ``early-exit:N`` or a checkpoint's, or ``lookup+`` and one of the others, for reports.
        path: the checkpoint's directory, if it is one.
        before: ``lookup+`` before a checkpoint, or nothing.
    """

    name: str
    path: Path | None
    before: str = ""

    @property
    def given(self) -> str:
        """As an engine has it."""
        return self.name if self.path is None else f"{self.before}{self.path}"

    @classmethod
    def find(cls, given: str, *, called: str | None = None, trust_remote_code: bool) -> EvaluatedDrafter:
        """What an evaluation's settings name.

        Args:
            given: ``lookup``, ``nested``, ``early-exit:N``, a checkpoint's directory or hub name, or ``lookup+`` and one of the others.
            called: the checkpoint's name in reports, if another one.
            trust_remote_code: run its own Python.

        Raises:
            SmeltError: there is no such checkpoint.
        """
        checkpoint = draft_checkpoint(given)
        if checkpoint is None:
            return cls(given, None)
        before = given.removesuffix(checkpoint)
        found = find_checkpoint(checkpoint, trust_remote_code=trust_remote_code)
        return cls(f"{before}{called or checkpoint}", found.path, before)

    @property
    def identity(self) -> str:
        """Says whether a measurement was made with it."""
        if self.path is None:
            return self.name
        checkpoint = Subject(self.name, ModelDirectory(self.name, self.path), "candidate")
        what = [checkpoint.fingerprint, checkpoint.companions]
        return digest([*what, self.before] if self.before else what)

    def drafts_for(self, subjects: Sequence[Subject]) -> list[Subject]:
        """The models that are measured with it.

        A checkpoint drafts for the baseline, or without one for all other models; ``nested`` for all but the baseline; all else for all.
        """
        served = [each for each in subjects if each.server is None and each.only_text is None]
        if self.path is None:
            is_nested = sources_of(self.name)[1] == NESTED
            return [each for each in served if each.role != "baseline" or not is_nested]
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
    options = replace(settings.engine(engine), drafter=drafter.given)
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
