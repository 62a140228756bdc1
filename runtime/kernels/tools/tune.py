"""Tuning: finding the fastest tiles for a device once, for its shipped file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from ....system.progress import Log
from ..base.launch import Launch, overlapping_at
from ..base.precompile import precompile
from ..base.targets import Target, target_of
from ..tiles.tile import Tiles, file_name, read, text, tiles_of
from .timing import device_lives, seconds


class Tunable(Protocol):
    """One shape of a kernel.

    Attributes:
        name: for messages.
        stage: shapes of one stage are compiled together before timing.
        listed: the name that its tile is listed under.
        rounds: how often tiles around the best are tried.
    """

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def listed(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def rows(self) -> int:
        """Of a step that has such a launch; all of a stage have as many."""
        ...

    def shipped(self, tiles: Tiles) -> Any:
        """Its current tile."""
        ...

    def around(self, best: Any, done: int, target: Target) -> list[Any]:
        """Tiles that may be faster than the best so far; the shipped one is the first best."""
        ...

    def launches(self, tile: Any, target: Target) -> list[Launch]:
        """A call's launches, on ``meta``."""
        ...

    def calls(self, device: torch.device) -> list[Callable[[Any], Tensor]]:
        """The same work with a tile, on different memory, so that inputs are not cached."""
        ...

    def kept(self, tiles: Tiles, tile: Any) -> Tiles:
        """A copy of the tiles with this one for it."""
        ...


@dataclass(frozen=True)
class Found:
    """The fastest tile of one shape so far.

    Attributes:
        of: the shape.
        tile: the fastest.
        seconds: its time.
        tried: how many tiles were tried.
        finished: whether the search is complete.
    """

    of: Tunable
    tile: Any
    seconds: float
    tried: int
    finished: bool = True


class NotHere(Exception):  # noqa: N818 - the user sees it as a message
    """There is no GPU to tune on, or its file cannot be written."""


def tune(work: Sequence[Tunable], limit_s: float, log: Log) -> Iterator[Found]:
    """Time candidates of each shape on this machine's GPU, within a time limit.

    All shapes of a stage run their rounds together, so that a round's variants are compiled in parallel on all processors.

    Args:
        work: later ones may not be reached.
        limit_s: nothing is started after this time.
        log: gets messages for the user.

    Yields:
        The fastest tile of a shape, after each of its rounds.

    Raises:
        NotHere: there is no GPU.
    """
    require_gpu()
    yield from search(work, torch.device("cuda"), limit_s, log)


def search(work: Sequence[Tunable], device: torch.device, limit_s: float, log: Log) -> Iterator[Found]:
    """:func:`tune` on a device."""
    target, start = target_of(device), time.monotonic()
    for stage in dict.fromkeys(one.stage for one in work):
        searches = [_TileSearch(one, device, target) for one in work if one.stage == stage]
        for done in range(max(one.of.rounds for one in searches)):
            if time.monotonic() - start > limit_s:
                log(f"{stage}: round {done + 1} not reached in {limit_s:.0f} s")
                break
            asked = [(one, one.asked(done)) for one in searches if done < one.of.rounds]
            launches = [x for one, tiles in asked for tile in tiles for x in one.of.launches(tile, target)]
            log(f"{stage}, round {done + 1}: compiling up to {len(launches)} variants")
            with overlapping_at(searches[0].of.rows):
                precompile(launches, log)
            for one, tiles in asked:
                if time.monotonic() - start > limit_s:
                    log(f"{one.of.name}: round {done + 1} not reached in {limit_s:.0f} s")
                    continue
                lives = one.take(tiles, log)
                # A tile that crashed the device would do so again.
                best = one.found(finished=not lives or done + 1 == one.of.rounds)
                if best is not None:
                    log(f"{best.of.name}: {best.seconds * 1e6:.1f} us with {best.tile}")
                    yield best
                if not lives:
                    return


def require_gpu() -> None:
    """Raise an error without a GPU.

    Raises:
        NotHere: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotHere("tiles are tuned on a GPU, and this machine has none; without tuning, the shipped tiles are used")


def write(found: Sequence[Found], restore_rows: int | None, path: Path | None = None) -> Path:
    """Write the tuned tiles as this device's, replacing earlier ones for the same shapes.

    Args:
        found: from :func:`tune`.
        restore_rows: the number of rows from which restoring is faster; None keeps the known value.
        path: the file; by default the shipped one.

    Raises:
        NotHere: the file cannot be written.
    """
    path, device = path or destination(), torch.device("cuda")
    here = _here()
    known = _measured(path)
    facts: dict[str, Any] = {
        **here,
        "tuned": sorted({*known.get("tuned", []), *(one.of.listed for one in found)}),
        "finished": sorted({*finished(path), *(one.of.name for one in found if one.finished)}),
    }
    description = f"{here['device']}; {', '.join(facts['tuned'])} measured by smelt kernels tune, others not"
    before = read(path, target_of(device)) if known else tiles_of(device)
    tiles = replace(overlaid(before, found), description=description)
    if restore_rows is not None:
        tiles = replace(tiles, restore_rows=restore_rows)
    try:
        partial = path.with_suffix(".partial")
        partial.write_text(text(tiles, facts))
        return partial.replace(path)
    except OSError as error:
        raise NotHere(f"{path} cannot be written ({error.strerror}); choose another place with --output") from None


def finished(path: Path) -> set[str]:
    """Names of the shapes that need not be tuned again: those in a file of this device, with these versions."""
    known = _measured(path)
    return set(known.get("finished", [])) if known and known.items() >= _here().items() else set()


def _here() -> dict[str, str]:
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _measured(path: Path) -> dict[str, Any]:
    """How the tiles in a file were measured; empty without a file."""
    try:
        return json.loads(path.read_text())["measured"] or {}
    except (OSError, ValueError, KeyError):
        return {}


def destination() -> Path:
    """The path of this device's tiles.

    Raises:
        NotHere: nothing can be written there.
    """
    path = Path(__file__).parents[1] / "tiles" / "configs" / file_name(torch.cuda.get_device_name())
    if not os.access(path.parent, os.W_OK):
        raise NotHere(f"{path.parent} cannot be written; choose another place with --output")
    return path


def overlaid(before: Tiles, found: Sequence[Found]) -> Tiles:
    """Known tiles, with those of the same shape replaced by new ones."""
    for one in found:
        before = one.of.kept(before, one.tile)
    return before


class _TileSearch:
    """The search for one shape's tile."""

    def __init__(self, of: Tunable, device: torch.device, target: Target) -> None:
        self.of = of
        self._device, self._target = device, target
        self._tried: dict[Any, float | None] = {}
        self._calls: list[Callable[[Any], Tensor]] = []
        self._expected: Tensor | None = None

    def asked(self, done: int) -> list[Any]:
        """The tiles of this round that were not tried before."""
        best = self._best() or self.of.shipped(tiles_of(self._device))
        return [
            tile for tile in dict.fromkeys([best, *self.of.around(best, done, self._target)]) if tile not in self._tried
        ]

    def take(self, tiles: list[Any], log: Log) -> bool:
        """Time them; false if one crashed the device.

        Tiles whose results differ from those of the first, shipped tile are skipped.
        """
        self._calls = self._calls or self.of.calls(self._device)
        for tile in tiles:
            self._tried[tile] = None
            try:
                with overlapping_at(self.of.rows):
                    self._tried[tile] = self._seconds(tile, log)
            except Exception as error:
                if not device_lives():
                    log(f"{self.of.name}: {tile} crashed the device ({error})")
                    return False
                # It does not compile, or needs too much memory.
        return True

    def found(self, *, finished: bool) -> Found | None:
        """The fastest so far."""
        best = self._best()
        taken = None if best is None else self._tried[best]
        return None if taken is None else Found(self.of, best, taken, len(self._tried), finished)

    def _best(self) -> Any:
        timed = {tile: taken for tile, taken in self._tried.items() if taken is not None}
        return min(timed, key=lambda tile: timed[tile]) if timed else None

    def _seconds(self, tile: Any, log: Log) -> float | None:
        if self._expected is not None:
            # What is freed here is what the outputs are written to, as a rule: what is not written shows.
            torch.full_like(self._expected, float("nan"))
        got = self._calls[0](tile)
        if self._expected is None:
            self._expected = got.clone()  # the next tile may write to the same memory
        error = float((got.float() - self._expected.float()).norm())
        got.fill_(float("nan"))  # what the next tile does not write there shows
        if not error <= 2e-2 * float(self._expected.float().norm()):
            log(f"{self.of.name}: {tile} gives wrong results and is skipped")
            return None
        return seconds([lambda call=call, tile=tile: call(tile) for call in self._calls], replays=5)
