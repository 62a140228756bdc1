"""Placement of the names of a plot's points, so that they cover neither points nor each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Disc:
    """A drawn point."""

    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Label:
    """Where a name is written."""

    x: float
    y: float
    anchor: Anchor


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a proportional font; East Asian characters are as wide as high."""
    return sum(1.0 if ord(c) > 0x2E7F else 0.58 for c in text) * size


def place(
    discs: list[Disc], names: list[str], order: list[int], frame: Box, size: float, lines: list[Box] | None = None
) -> list[Label | None]:
    """A place for each name, or None where there is no room.

    Args:
        discs: the points, all of which are drawn.
        names: the label of each.
        order: positions in ``discs``, by priority.
        frame: left, top, right and bottom of where a name may be.
        size: of the font.
        lines: what else a name should not cover, if there is room elsewhere.
    """
    found: list[Label | None] = [None] * len(discs)
    # A name may cross a large disc's rim, but not come near its middle, where the value is.
    taken: list[Box] = [_around(d, min(d.radius, 0.55 * d.radius + 3)) for d in discs]
    for i in order:
        width = text_width(names[i], size)
        options: list[tuple[int, int, Label, Box]] = []
        for label in _places(discs[i], size):
            left = label.x - {"start": 0.0, "middle": width / 2, "end": width}[label.anchor]
            box = (left, label.y - 0.8 * size, left + width, label.y + 0.25 * size)
            free = not any(_overlap(box, other) for j, other in enumerate(taken) if j != i)
            if free and _inside(box, frame):
                hidden = sum(_overlap(box, line) for line in lines or ())
                options.append((hidden, len(options), label, box))
        if options:
            _, _, found[i], box = min(options)
            taken.append(box)
    return found


def _places(disc: Disc, size: float) -> list[Label]:
    gap = disc.radius + 5
    slant = 0.72 * gap
    middle = disc.y + 0.3 * size
    return [
        Label(disc.x + gap, middle, "start"),
        Label(disc.x - gap, middle, "end"),
        Label(disc.x, disc.y - gap, "middle"),
        Label(disc.x, disc.y + gap + 0.8 * size, "middle"),
        Label(disc.x + slant, disc.y - slant, "start"),
        Label(disc.x + slant, disc.y + slant + 0.7 * size, "start"),
        Label(disc.x - slant, disc.y - slant, "end"),
        Label(disc.x - slant, disc.y + slant + 0.7 * size, "end"),
    ]


def _around(disc: Disc, radius: float) -> Box:
    return disc.x - radius, disc.y - radius, disc.x + radius, disc.y + radius


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
