"""Finding the fastest tiles for a device, once, into the file that is shipped for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from .launch import Launch
from .precompile import precompile
from .targets import Target, target_of
from .tile import Tiles, file_name, text, tiles_of
from .timing import device_lives, seconds


class Tunable(Protocol):
    """One shape of a kernel.

    Attributes:
        name: for people.
        stage: what is compiled together, before any of it is timed.
        listed: what its tile is listed under, for people.
    """

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def listed(self) -> str: ...

    def shipped(self, tiles: Tiles) -> Any:
        """The tile that it has now."""
        ...

    def candidates(self, target: Target) -> list[Any]:
        """Tiles that may be faster."""
        ...

    def launches(self, tile: Any, target: Target) -> list[Launch]:
        """What a call launches, on ``meta``."""
        ...

    def calls(self, device: torch.device) -> list[Callable[[Any], Tensor]]:
        """The same work by a tile, on different memory, so that none finds its inputs in the cache."""
        ...

    def kept(self, tiles: Tiles, tile: Any) -> Tiles:
        """Tiles with this one for it."""
        ...


@dataclass(frozen=True)
class Found:
    """The fastest tile of one shape.

    Attributes:
        of: the shape.
        tile: the fastest.
        seconds: its time.
        tried: how many were.
    """

    of: Tunable
    tile: Any
    seconds: float
    tried: int


class NotHere(Exception):  # noqa: N818 - it is told, not debugged
    """There is no GPU to tune on, or its file cannot be written."""


def tune(work: Sequence[Tunable], limit_s: float, told: Callable[[str], object]) -> Iterator[Found]:
    """Time candidates of each shape on this machine's GPU, until time is up.

    Args:
        work: later ones may not be reached.
        limit_s: no shape is begun after so long.
        told: hears of progress.

    Raises:
        NotHere: there is no GPU.
    """
    require_gpu()
    device, start = torch.device("cuda"), time.monotonic()
    target = target_of(device)
    for stage in dict.fromkeys(one.stage for one in work):
        those = [one for one in work if one.stage == stage]
        if time.monotonic() - start > limit_s:
            told(f"{stage}: not reached in {limit_s:.0f} s")
            continue
        launches = [x for one in those for tile in one.candidates(target) for x in one.launches(tile, target)]
        told(f"{stage}: compiling up to {len(launches)} variants")
        precompile(launches, told)
        for one in those:
            if time.monotonic() - start > limit_s:
                told(f"{one.name}: not reached in {limit_s:.0f} s")
                continue
            best = _fastest(one, device, told)
            torch.cuda.empty_cache()
            if best is not None:
                told(f"{one.name}: {best.seconds * 1e6:.1f} us with {best.tile}")
                yield best


def require_gpu() -> None:
    """Say so if there is none.

    Raises:
        NotHere: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotHere("tiles are tuned on a GPU, and this machine has none; the shipped ones serve without")


def write(found: Sequence[Found], restore_rows: int | None, path: Path | None = None) -> Path:
    """Keep what was found as this device's tiles, over those that it had.

    Args:
        found: from :func:`tune`.
        restore_rows: from how many rows on restoring pays; None leaves what was known.
        path: where to; the shipped place if there is none.

    Raises:
        NotHere: the file cannot be written.
    """
    device = torch.cuda.get_device_name()
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    facts["tuned"] = sorted({one.of.listed for one in found})
    told = f"{device}; {', '.join(facts['tuned'])} measured by smelt kernels tune, others not"
    tiles = replace(overlaid(tiles_of(torch.device("cuda")), found), told=told)
    if restore_rows is not None:
        tiles = replace(tiles, restore_rows=restore_rows)
    path = path or destination()
    try:
        partial = path.with_suffix(".partial")
        partial.write_text(text(tiles, facts))
        return partial.replace(path)
    except OSError as error:
        raise NotHere(f"{path} cannot be written ({error.strerror}); choose another place with --output") from None


def destination() -> Path:
    """Where this device's tiles are kept.

    Raises:
        NotHere: nothing can be written there.
    """
    path = Path(__file__).parent / "configs" / file_name(torch.cuda.get_device_name())
    if not os.access(path.parent, os.W_OK):
        raise NotHere(f"{path.parent} cannot be written; choose another place with --output")
    return path


def overlaid(before: Tiles, found: Sequence[Found]) -> Tiles:
    """Known tiles with new ones in place of those for the same shape."""
    for one in found:
        before = one.of.kept(before, one.tile)
    return before


def _fastest(one: Tunable, device: torch.device, told: Callable[[str], object]) -> Found | None:
    """The fastest candidate that computes what the shipped tile does."""
    calls, first, best, tried = one.calls(device), None, None, 0
    shipped = one.shipped(tiles_of(device))
    expected = calls[0](shipped).float()
    for tile in dict.fromkeys([shipped, *one.candidates(target_of(device))]):
        try:
            got = calls[0](tile).float()
            if float((got - expected).norm()) > 2e-2 * float(expected.norm()):
                told(f"{one.name}: {tile} computes something else, and is left out")
                continue
            # One look first; what is far behind is not timed well.
            once = seconds([lambda call=call, tile=tile: call(tile) for call in calls], replays=1)
            if first is not None and once > 1.5 * first:
                continue
            taken = seconds([lambda call=call, tile=tile: call(tile) for call in calls], replays=5)
        except Exception as error:
            if not device_lives():
                told(f"{one.name}: {tile} stopped the device ({error})")
                return None
            continue  # it does not compile, or asks for too much
        tried += 1
        first = taken if first is None else min(first, taken)
        if best is None or taken < best.seconds:
            best = Found(one, tile, taken, tried)
    return None if best is None else replace(best, tried=tried)
