"""Tables as plain data, which ``templates/macros.html.jinja`` writes for the page, and :mod:`..markdown` as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it shows.
        sort: the sort key, if not its text.
        notes: small print below it; empty notes are omitted.
        kind: ``name`` for a name from outside, ``worse`` for a slowdown.
        items: sentences, shown as a list instead of the text.
    """

    text: str
    sort: float | str | None = None
    notes: Sequence[str | Cell] = ()
    kind: Literal["plain", "name", "worse"] = "plain"
    items: Sequence[str] = ()

    @property
    def sort_key(self) -> float | str | None:
        """As JavaScript reads it; NaN sorts like a missing value."""
        key = self.sort
        if not isinstance(key, float) or math.isfinite(key):
            return key
        return "" if math.isnan(key) else f"{'-' if key < 0 else ''}Infinity"


Row = tuple[int | None, Sequence[Cell | None]]  # the model's position in the report, and its cells


@dataclass(frozen=True)
class Column:
    """A column's head, and whether it holds numbers rather than text."""

    head: str
    of_numbers: bool


@dataclass(frozen=True)
class Table:
    """A table without empty columns.

    Attributes:
        caption: of the table.
        columns: the heads.
        rows: one cell per column each.
        note: explains the columns.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Row], *, words: Sequence[str] = (), note: str = ""
) -> Table | None:
    """A table without the columns in which nothing was measured; None if fewer than two are left.

    Args:
        caption: of the table.
        heads: of the columns.
        rows: a cell that is None was not measured and is empty.
        words: heads of columns that hold text rather than numbers, besides the first.
        note: explains the columns.
    """
    rows = list(rows)
    kept = [i for i in range(len(heads)) if any(cells[i] is not None for _, cells in rows)]
    if len(kept) < 2:
        return None
    columns = [Column(heads[i], heads[i] not in {heads[0], *words}) for i in kept]
    return Table(caption, columns, [(model, [cells[i] for i in kept]) for model, cells in rows], note)
