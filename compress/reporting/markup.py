"""The few pieces of HTML that the page is built from. Names and texts of models are not trusted."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# XML has no way to write these, and the plot is XML.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def esc(text: object) -> str:
    """Text for HTML and SVG, in content and in quoted attributes."""
    return html.escape(_UNWRITABLE.sub("\ufffd", str(text)), quote=True)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        html: what it shows, already escaped.
        sort: what it is sorted by, where that is not its text.
    """

    html: str
    sort: float | str | None = None


Row = tuple[int | None, Sequence[Cell | None]]  # the model's position in the report, and its cells


def table(caption: str, heads: Sequence[str], rows: Iterable[Row], *, words: Sequence[str] = (), note: str = "") -> str:
    """A sortable table in a box of its own that scrolls. Columns in which nothing was measured are left out.

    Args:
        caption: plain text; says what the table holds.
        heads: plain text.
        rows: a cell that is None was not measured and stays empty.
        words: heads of columns that hold text rather than numbers, besides the first.
        note: plain text that explains the columns.
    """
    rows = list(rows)
    kept = [i for i in range(len(heads)) if any(cells[i] is not None for _, cells in rows)]
    if len(kept) < 2:
        return ""
    plain = {heads[0], *words}
    head = "".join(f'<th scope="col"{_kind(heads[i], plain)}>{esc(heads[i])}</th>' for i in kept)
    body = []
    for model, cells in rows:
        attribute = "" if model is None else f' data-model="{model}"'
        columns = "".join(_cell(cells[i], heads[i], plain, first=i == kept[0]) for i in kept)
        body.append(f"<tr{attribute}>{columns}</tr>")
    said = f"<figcaption>{esc(caption)}{f'<small>{esc(note)}</small>' if note else ''}</figcaption>"
    return (
        f'<figure class="table">{said}<div class="scroll" role="group" tabindex="0" aria-label="{esc(caption)}">'
        f'<table class="sortable" aria-label="{esc(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></figure>"
    )


def name(text: str) -> str:
    """A name from outside: what it does to the direction of writing stays inside it."""
    return f"<bdi>{esc(text)}</bdi>"


def beside(main: str, *notes: str) -> str:
    """A value with smaller notes under it; empty notes are left out."""
    said = "".join(f"<small>{note}</small>" for note in notes if note)
    return f"{main}{said}"


def fold(summary: str, body: str, *, opened: bool = False) -> str:
    """Something that opens. ``summary`` and ``body`` are HTML."""
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{body}</details>" if body else ""


def section(key: str, title: str, body: str) -> str:
    """A part of the page under its own heading; nothing if it has no content."""
    if not body:
        return ""
    return f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{esc(title)}</h2><div class="body">{body}</div></section>'


def bullets(items: Iterable[str]) -> str:
    """A list of sentences, escaped here."""
    inside = "".join(f"<li>{esc(item)}</li>" for item in items)
    return f"<ul>{inside}</ul>" if inside else ""


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, escaped here."""
    inside = "".join(f"<div><dt>{esc(key)}</dt><dd>{esc(value)}</dd></div>" for key, value in pairs if value)
    return f'<dl class="facts">{inside}</dl>' if inside else ""


def _kind(head: str, plain: set[str]) -> str:
    return "" if head in plain else ' class="n"'


def _sorted_by(key: float | str) -> float | str:
    """As JavaScript reads it; what is not a number is sorted as what was not measured."""
    if not isinstance(key, float) or math.isfinite(key):
        return key
    return "" if math.isnan(key) else f"{'-' if key < 0 else ''}Infinity"


def _cell(cell: Cell | None, head: str, plain: set[str], *, first: bool) -> str:
    kind = _kind(head, plain)
    if cell is None:
        return f"<td{kind}></td>"
    sort = "" if cell.sort is None else f' data-sort="{esc(_sorted_by(cell.sort))}"'
    return f'<th scope="row"{sort}>{cell.html}</th>' if first else f"<td{kind}{sort}>{cell.html}</td>"
