"""The live page's charts."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.http.config import ServerConfig

from ..serving import Serving, served, serving
from .shown import Opened, say


def _cells(shown: Any, chart: str) -> list[str]:
    return shown.get_by_role("table", name=chart).locator("tbody td").all_inner_texts()


def _reaches(shown: Any, chart: str, holds: Callable[[list[str]], bool]) -> list[str]:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        found = _cells(shown, chart)
        if found and holds(found):
            return found
        shown.wait_for_timeout(50)
    raise AssertionError((chart, _cells(shown, chart)))


@pytest.mark.usefixtures("slowly")
def test_charts_show_what_the_engine_does(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
    _reaches(shown, "Tokens per second", lambda cells: cells == ["0", "0"])
    assert _cells(shown, "Time between tokens") == ["–", "–"], "nothing was generated while the page was open"
    say(shown, "Tell me a story", tokens=400)
    _reaches(shown, "Requests", lambda cells: cells == ["1", "0"])
    # A step takes at least 30 ms.
    assert 1 <= float(_reaches(shown, "Tokens per second", lambda cells: float(cells[0]) > 1)[0]) <= 50
    assert _reaches(shown, "KV cache use", lambda cells: cells != ["0%"])
    p50, p99 = _reaches(shown, "Time between tokens", lambda cells: cells[0] != "–")
    assert float(p50.removesuffix(" ms")) >= 25, "the bucket that has 30 ms begins there"
    assert p99.endswith("s")
    assert _cells(shown, "Time to the first token")[0] != "–"
    shown.get_by_role("button", name="Stop").click()
    _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
    _reaches(shown, "Tokens per second", lambda cells: cells[0] == "0")


def test_a_charts_values_can_be_read_at_any_time(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    plot = shown.get_by_role("slider", name="Requests: values over time")
    when = shown.get_by_role("table", name="Requests").locator("thead th").first
    shown.wait_for_function("() => document.querySelectorAll('.chart tbody td').length > 0")
    shown.wait_for_timeout(3500)
    assert when.inner_text() == "now"
    plot.focus()
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("ArrowLeft")
    assert re.fullmatch(r"[2-4] s ago: smelt-6m running 0, smelt-6m waiting 0", plot.get_attribute("aria-valuetext"))
    assert plot.get_attribute("aria-valuetext").startswith(when.inner_text())
    assert plot.locator(".cursor").count() == 1
    shown.keyboard.press("Escape")
    assert when.inner_text() == "now"
    assert plot.locator(".cursor").count() == 0
    shown.keyboard.press("Home")
    assert int(when.inner_text().split()[0]) >= 3
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] - 10, box["y"] + 50)
    assert when.inner_text() in ("now", "1 s ago")


def test_each_model_has_its_lines_and_its_row(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    table = shown.get_by_role("table", name="Tokens per second")
    table.locator("tbody tr").nth(1).wait_for()
    assert table.locator("tbody th").all_inner_texts() == ["dry", "rainy"]
    plot = shown.get_by_role("slider", name="Requests: values over time")
    strokes = plot.locator("polyline").evaluate_all(
        "lines => lines.map((l) => [getComputedStyle(l).stroke, getComputedStyle(l).strokeDasharray !== 'none'])"
    )
    assert len({tuple(stroke) for stroke in strokes}) == 4, "two colours, each whole and dashed"


def test_the_metrics_are_read_as_prometheus_reads_them(opened: Opened, server: Serving) -> None:
    lines = httpx2.get(f"{server.url}/metrics").text
    lines += '# TYPE odd gauge\nodd{a="x\\\\n\\n\\"}{",b=""} +Inf\nodd{a=","} -1.5e-07\n'
    wanted = [
        [sample.name, sample.labels, str(sample.value)]
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    ]
    found = opened(server).evaluate(
        "lines => import('/static/metrics.js').then(({ parse }) =>"
        " parse(lines).map(({ name, labels, value }) => [name, labels, String(value).replace('Infinity', 'inf')]))",
        lines,
    )
    assert [[name, labels, str(float(value))] for name, labels, value in found] == wanted
    assert len(found) > 50


@pytest.mark.parametrize("prefix", ["smelt", "vllm"])
def test_the_prefix_is_found(prefix: str, opened: Opened, engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(metrics_prefix=prefix)) as found:
        shown = opened(found)
        _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
        shown.close()


@pytest.mark.parametrize(
    ("share", "before", "after", "wanted"),
    [
        # Ten values: four up to 1, four up to 2, two beyond. The fifth is a quarter into the second bucket.
        (0.5, [], [[1, 4], [2, 8], ["Infinity", 10]], 1.25),
        (0.2, [], [[1, 4], [2, 8], ["Infinity", 10]], 0.5),
        (0.99, [], [[1, 4], [2, 8], ["Infinity", 10]], 2),
        # Of those, only the two beyond are new.
        (0.5, [[1, 4], [2, 8], ["Infinity", 8]], [[1, 4], [2, 8], ["Infinity", 10]], 2),
        (0.5, [[1, 4], [2, 4], ["Infinity", 4]], [[1, 4], [2, 8], ["Infinity", 8]], 1.5),
        (0.5, [[1, 4], [2, 8], ["Infinity", 10]], [[1, 4], [2, 8], ["Infinity", 10]], None),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(
    share: float, before: list[Any], after: list[Any], wanted: float | None, opened: Opened, server: Serving
) -> None:
    found = opened(server).evaluate(
        "([share, before, after]) => import('/static/metrics.js').then(({ quantile }) => {"
        " const map = (pairs) => new Map(pairs.map(([bound, count]) => [Number(bound), count]));"
        " return quantile(share, map(before), map(after)); })",
        [share, before, after],
    )
    assert found == wanted


def test_rates_are_over_the_time_between_polls_and_start_again_with_the_server(opened: Opened, server: Serving) -> None:
    found = opened(server).evaluate(
        "polls => import('/static/history.js').then(({ History }) => {"
        " const history = new History();"
        " for (const [at, prompt] of polls) history.add(at, new Map([['m', { prompt, first: new Map(), between: new Map() }]]));"
        " return history.points.map(({ at, models }) => [at, models.get('m').prompt]); })",
        # The server starts again between 3 and 4, and the page is not looked at from 5 to 400.
        [[0, 100], [1, 110], [2, 150], [3, 150], [4, 7], [5, 9], [400, 1000], [401, 1005]],
    )
    assert found == [[400, None], [401, 5]]
    found = opened(server).evaluate(
        "polls => import('/static/history.js').then(({ History }) => {"
        " const history = new History();"
        " for (const [at, prompt] of polls) history.add(at, new Map([['m', { prompt, first: new Map(), between: new Map() }]]));"
        " return history.points.map(({ models }) => models.get('m').prompt); })",
        [[0, 100], [1, 110], [2, 150], [3, 150], [4, 7], [5, 9]],
    )
    assert found == [None, 10, 25, 20, None, 2]


@pytest.mark.parametrize("highest", [1, 0.001, 37, 99, 100, 101, 1234, 2.5e-9])
@pytest.mark.parametrize("whole", [False, True])
def test_ticks_are_round_few_and_reach_the_highest_value(
    highest: float, whole: bool, opened: Opened, server: Serving
) -> None:
    ticks = opened(server).evaluate(
        "([highest, whole]) => import('/static/axis.js').then(({ ticks }) => ticks(highest, whole))", [highest, whole]
    )
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] >= highest * 0.999
    steps = {float(f"{after - before:.6g}") for before, after in itertools.pairwise(ticks)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"
    assert not whole or all(tick == int(tick) for tick in ticks)
