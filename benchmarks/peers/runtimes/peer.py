"""What every measured runtime is: it converts a checkpoint, loads it, and generates tokens while a clock notes when they come."""

from __future__ import annotations

import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

Tokens = list[int]

SEED = 0
PREFILL_LENGTHS = (512, 1024)
DECODE_LENGTHS = (128, 1024)
OUTPUT_TOKENS = 32
REQUESTS = 32
REQUEST_PROMPT = 128
LONGEST = max(*PREFILL_LENGTHS, *DECODE_LENGTHS) + OUTPUT_TOKENS


class PeerError(Exception):
    """A peer could not be converted, loaded or measured."""


@dataclass(frozen=True)
class PeerSettings:
    """What a peer is given to work with."""

    model: Path
    scratch: Path
    threads: int
    exporter: str

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config


class TokenClock:
    """Notes the moment at which each token arrives."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def tick(self, count: int = 1) -> None:
        """Note that ``count`` tokens have just arrived."""
        self.moments.extend([time.perf_counter()] * count)

    def seconds_after_first(self, wanted: int) -> float:
        """From the first token to the last of ``wanted``."""
        check_count(len(self.moments), wanted)
        return self.moments[-1] - self.moments[0]


class Peer(ABC):
    """One runtime.

    Attributes:
        package: whose installed version is shown.
        format: of the weights, in words.
        notes: how it is run.
    """

    package: ClassVar[str]
    format: ClassVar[str]
    notes: ClassVar[str]
    prefill_lengths: ClassVar[Sequence[int]] = PREFILL_LENGTHS
    decode_lengths: ClassVar[Sequence[int]] = DECODE_LENGTHS

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings

    @property
    def version(self) -> str:
        """The installed version of the runtime."""
        return version(self.package)

    def convert(self) -> None:  # noqa: B027 - runtimes that read checkpoints as they are need none
        """Write the peer's own model format into the scratch folder, once."""

    @abstractmethod
    def load(self) -> None:
        """Load the converted model."""

    @abstractmethod
    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        """Generate exactly ``count`` greedy tokens after each prompt, all of one length, from an empty cache; the clock notes a
        single prompt's."""

    def prefill(self, tokens: Tokens) -> float:
        """Seconds from an empty cache to the first token."""
        return seconds(lambda: self.generate([tokens], 1))

    def decode(self, tokens: Tokens, count: int) -> float:
        """Seconds from the first to the last of ``count`` tokens."""
        clock = TokenClock()
        self.generate([tokens], count, clock)
        return clock.seconds_after_first(count)

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        """Seconds to answer all prompts, started at once, with ``count`` tokens each."""
        return seconds(lambda: self.generate(prompts, count))

    def concurrent_runs(self) -> dict[str, Callable[[list[Tokens], int], float]]:
        """The ways in which this peer serves many requests, by the result's field."""
        return {"concurrent_32": self.concurrent}


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def convert_once(target: Path, build: Callable[[Path], None]) -> None:
    """Build ``target`` unless an earlier run did; a build cut short leaves no target."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    build(partial)
    partial.rename(target)


def check_count(got: int, wanted: int) -> None:
    """Refuse a run that stopped early or late, as its time would mean nothing."""
    if got != wanted:
        raise PeerError(f"The peer produced {got} tokens where {wanted} were asked for.")
