"""The Markdown report, as a reader of Markdown sees it: it says what the page says, and nothing from outside becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from smelt.compress.reporting.markdown import markdown
from smelt.compress.reporting.page.page import page
from smelt.compress.results.report import ReportData

from .. import report_samples as samples

ALL = [samples.full, samples.minimal, samples.partial, samples.sweep, samples.hostile]


class _Tables(HTMLParser):
    """The words of each table's rows."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tables: list[list[list[list[str]]]] = []
        self.elements: set[str] = set()
        self._inside = False
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append([])
        self._inside = self._inside or tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += re.findall(r"[^\s();,]+", data)


def _read(report: ReportData) -> _Tables:
    return _Tables(MarkdownIt("commonmark").enable("table").render(markdown(report)))


@pytest.mark.parametrize("make", ALL)
def test_its_tables_of_models_accuracy_and_speed_are_those_of_the_page(make: Callable[[], ReportData]) -> None:
    found, shown = _read(make()).tables, _Tables(page(make())).tables
    heads = [{word for cell in table[0] for word in cell} for table in found]
    of_layers_or_training = [bool({"weight", "held-out"} & words) for words in heads]
    same = [table for table, other in zip(found, of_layers_or_training, strict=True) if not other]
    assert same
    for table in same:
        assert table in shown


@pytest.mark.parametrize("make", ALL)
def test_it_has_no_markup_from_outside(make: Callable[[], ReportData]) -> None:
    known = {
        "h1",
        "h2",
        "p",
        "strong",
        "blockquote",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
        "pre",
        "code",
    }
    assert _read(make()).elements <= known


def test_what_was_not_measured_is_not_said() -> None:
    said = markdown(samples.minimal())
    assert not re.search(r"\b(None|nan|inf)\b", said)
    assert "decode" not in said
