"""The HTML report: what it says, that it is safe, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from smelt.compress.reporting.page.page import page
from smelt.compress.reporting.plot.pareto import front, pareto_svg
from smelt.compress.reporting.plot.plot_axis import PlotAxis
from smelt.compress.results import wording
from smelt.compress.results.report import ReportData
from smelt.compress.results.result import Against, Change, Size, Spread

from ...tiny import REPOSITORY
from .. import report_samples as samples

ALL = [samples.full, samples.minimal, samples.partial, samples.sweep, samples.hostile]
_SVG = "{http://www.w3.org/2000/svg}"


class _Words(HTMLParser):
    """What a reader sees, and the elements that there are."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._silent = False
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def _text(report: ReportData) -> str:
    return _Words(page(report)).text


def _embedded(markup: str) -> Any:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', markup, re.S)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("make", ALL)
def test_what_was_not_measured_is_not_on_the_page(make: Callable[[], ReportData]) -> None:
    text = _text(make())
    assert not re.search(r"\b(None|null|nan|NaN|inf|undefined)\b", text)


def test_a_report_without_speed_tasks_and_layers_has_no_sections_for_them() -> None:
    parsed = _Words(page(samples.minimal()))
    ids = {attributes.get("id") for tag, attributes in parsed.elements if tag == "section"}
    assert ids == {"tradeoff", "accuracy", "numbers", "made"}
    assert "faster" not in parsed.text
    assert "decode" not in parsed.text


def test_columns_in_which_nothing_was_measured_are_left_out() -> None:
    assert "change of bits" in _text(samples.full())
    assert "change of bits" not in _text(samples.minimal())


def test_a_slowdown_is_said_in_words_marked_and_explained() -> None:
    markup = page(samples.full())
    row = next(r for r in re.findall(r'<article class="headline".*?</article>', markup, re.S) if "W3A16 hqq" in r)
    assert re.search(r'<div class="worse"><dt>decode</dt><dd><strong>1\.3× slower</strong>', row)
    assert "48 linears of 3 bits are unpacked" in row
    assert "From its bytes alone" not in row
    quick = next(r for r in re.findall(r'<article class="headline".*?</article>', markup, re.S) if "W4A16 gptq" in r)
    assert "worse" not in quick
    assert "2.9× faster" in quick


def test_a_slowdown_in_a_table_of_many_candidates_is_marked_and_explained() -> None:
    models = [*samples.sweep(5).models, samples.full().models[3]]
    markup = page(samples.report(models))
    assert 'class="headline"' not in markup
    row = next(r for r in re.findall(r"<tr.*?</tr>", markup, re.S) if "W3A16 hqq" in r)
    assert '<span class="worse">1.3× slower</span>' in row
    assert "48 linears of 3 bits are unpacked" in row


@pytest.mark.parametrize(("significant", "said"), [(False, True), (True, False), (None, False)])
def test_within_noise_is_said_exactly_where_an_interval_says_so(significant: bool | None, said: bool) -> None:
    original, one = samples.full().models[:2]
    against = Against(decode=Change(ratio=1.02, significant=significant))
    bare = one.model_copy(update={"against": against})
    assert (wording.WITHIN_NOISE in _text(samples.report([original, bare]))) is said


def test_a_partial_report_lists_what_it_lacks() -> None:
    text = _text(samples.partial())
    assert "This report is partial." in text
    assert "speed of W8A16 rtn: the process was stopped" in text
    assert "partial" not in _text(samples.full())


@pytest.mark.parametrize("make", ALL)
def test_the_embedded_json_is_the_report(make: Callable[[], ReportData]) -> None:
    assert _embedded(page(make())) == make().as_data()


def test_numbers_that_json_cannot_hold_are_null_in_the_embedded_report() -> None:
    report = samples.minimal()
    assert report.models[0].text is not None
    broken = report.models[0].text.model_copy(update={"perplexity": float("inf")})
    markup = page(samples.report([report.models[0].model_copy(update={"text": broken})]))
    assert _embedded(markup)["models"][0]["text"]["perplexity"] is None
    assert "∞" in markup


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_a_model_that_broke_down_still_has_a_page(value: float) -> None:
    original, broken = samples.full().models[:2]
    assert broken.text is not None
    assert broken.speed is not None
    stuck = Spread(median=value, values=[value])
    part = broken.speed.decode_time[0].model_copy(update={"seconds": value})
    changes = {
        "text": broken.text.model_copy(update={"perplexity": value, "bits_per_byte": value}),
        "speed": broken.speed.model_copy(update={"decode_rate": stuck, "decode_time": [part]}),
        "layers": [broken.layers[1].model_copy(update={"error": value})],
        "against": Against(decode=Change(ratio=value), perplexity=Change(ratio=value)),
    }
    report = samples.report([original, broken.model_copy(update=changes)])
    markup = page(report)
    assert not re.search(r"\b(nan|inf)\b", markup.split("</style>")[1].split('<script type="application/json"')[0])
    ElementTree.fromstring(pareto_svg(report) or "<svg/>")


@pytest.mark.parametrize("make", ALL)
def test_the_page_asks_for_nothing_and_has_no_inline_handlers(make: Callable[[], ReportData]) -> None:
    parsed = _Words(page(make()))
    for tag, attributes in parsed.elements:
        assert tag not in {"iframe", "object", "embed", "base", "img"}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", "the policy lets no style attributes through"
            if name in {"href", "src", "action", "data"}:
                assert value is not None
                assert value.startswith(("#", "data:")), (tag, value)
    policy = next(a["content"] for t, a in parsed.elements if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_hostile_strings_become_text_and_no_elements() -> None:
    markup = page(samples.hostile())
    parsed = _Words(markup)
    assert "<img src=x onerror=alert(1)>" in parsed.text
    assert "</script><script>alert(2)</script>" in parsed.text
    assert sum(tag == "script" for tag, _ in parsed.elements) == 2
    assert not {"img", "b"} & {tag for tag, _ in parsed.elements}
    assert "\x00" not in markup


def test_characters_that_xml_cannot_write_are_replaced() -> None:
    original, one = samples.full().models[:2]
    report = samples.report([original, one.model_copy(update={"name": "4\x07bits\x9b\ufffe"})])
    shown = "4\ufffdbits\ufffd\ufffd"
    root = ElementTree.fromstring(pareto_svg(report) or "")
    assert shown in [name.text for name in root.iter(f"{_SVG}text")]
    assert shown in _text(report)


def test_what_a_page_is_made_of_is_installed() -> None:
    folder = REPOSITORY / "compress" / "reporting"
    setup = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    besides = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    installed = {
        path
        for package, patterns in setup["package-data"].items()
        if package.startswith("smelt.compress.reporting")
        for pattern in patterns
        for path in folder.joinpath(*package.split(".")[3:]).glob(pattern)
    }
    assert besides == installed


@pytest.mark.parametrize("make", [samples.full, samples.partial, samples.sweep, samples.hostile])
@pytest.mark.parametrize("width", [760, 360])
def test_the_plot_is_well_formed_and_stays_in_its_box(make: Callable[[], ReportData], width: int) -> None:
    svg = pareto_svg(make(), width)
    assert svg is not None
    root = ElementTree.fromstring(svg)
    right, bottom = (float(x) for x in root.attrib["viewBox"].split()[2:])
    for circle in root.iter(f"{_SVG}circle"):
        x, y, r = (float(circle.attrib[k]) for k in ("cx", "cy", "r"))
        assert r <= x <= right - r
        assert r <= y <= bottom - r


def test_the_plot_needs_two_models_with_both_quantities() -> None:
    assert pareto_svg(samples.minimal()) is None
    original, one = samples.full().models[:2]
    assert pareto_svg(samples.report([original, one.model_copy(update={"text": None, "tasks": []})])) is None
    assert pareto_svg(samples.report([original, one])) is not None


def test_circles_have_areas_in_proportion_to_checkpoints() -> None:
    report = samples.full()
    root = ElementTree.fromstring(pareto_svg(report) or "")
    ratios = []
    for group in root.iter(f"{_SVG}g"):
        circle = next(c for c in group.iter(f"{_SVG}circle") if c.get("class") == "area")
        size = report.models[int(group.attrib["data-model"])].size.bytes
        ratios.append(float(circle.attrib["r"]) ** 2 / size)
    assert len(ratios) == 4
    assert max(ratios) / min(ratios) == pytest.approx(1, rel=0.02)  # radii are written with one decimal


def test_better_is_up_and_to_the_right() -> None:
    root = ElementTree.fromstring(pareto_svg(samples.full()) or "")
    at = {}
    for group in root.iter(f"{_SVG}g"):
        circle = next(c for c in group.iter(f"{_SVG}circle") if c.get("class") == "area")
        at[int(group.attrib["data-model"])] = float(circle.attrib["cx"]), float(circle.attrib["cy"])
    assert at[1][0] > at[0][0] > at[3][0], "2.9 times, once and 0.77 times the baseline's speed"
    assert at[0][1] < at[1][1] < at[3][1], "perplexity rises from the baseline to the third candidate"


def test_the_front_is_what_no_point_beats() -> None:
    points = [(1.0, 9.0), (2.0, 8.0), (2.0, 7.0), (3.0, 8.0), (5.0, 1.0), (4.0, 1.0), (0.5, 9.0)]
    assert front(points) == [0, 3, 4]
    assert front([(1.0, 1.0), (1.0, 1.0)]) == [0, 1]


def test_models_on_the_front_are_drawn_as_such() -> None:
    root = ElementTree.fromstring(pareto_svg(samples.full()) or "")
    kinds = {int(g.attrib["data-model"]): g.attrib["class"].split() for g in root.iter(f"{_SVG}g")}
    assert {i for i, kind in kinds.items() if "on" in kind} == {0, 1, 2}
    assert [i for i, kind in kinds.items() if "baseline" in kind] == [0]


def test_without_speed_the_plot_has_the_checkpoint_and_smaller_is_better() -> None:
    models = [m.model_copy(update={"speed": None}) for m in samples.full().models]
    big = models[0].size.model_dump() | {"bytes": 3_000_000_000}
    # As accurate as the second candidate and larger: beaten only if fewer bytes count as better.
    worse = models[2].model_copy(update={"name": "larger", "size": Size(**big), "role": "candidate"})
    root = ElementTree.fromstring(pareto_svg(samples.report([*models, worse])) or "")
    text = " ".join(root.itertext())
    assert "Checkpoint, GB" in text
    kinds = {int(g.attrib["data-model"]): g.attrib["class"].split() for g in root.iter(f"{_SVG}g")}
    assert {i for i, kind in kinds.items() if "on" in kind} == {0, 1, 2, 3}
    assert "off" in kinds[4]


def test_models_that_read_different_tokens_are_compared_by_bits_per_byte() -> None:
    original, one = samples.full().models[:2]
    assert one.text is not None
    other = one.model_copy(update={"text": one.text.model_copy(update={"text_sha256": "00" * 32})})
    text = " ".join(ElementTree.fromstring(pareto_svg(samples.report([original, other])) or "").itertext())
    assert "Bits per byte" in text
    assert "erplexity" not in text


def test_without_text_the_mean_of_the_tasks_is_drawn() -> None:
    models = [m.model_copy(update={"text": None}) for m in samples.full().models]
    text = " ".join(ElementTree.fromstring(pareto_svg(samples.report(models)) or "").itertext())
    assert "Mean of 2 tasks" in text
    assert "Mean of 2 tasks: 0.632" in text, "the baseline's (0.61 + 0.655) / 2"


def test_a_model_that_is_not_drawn_is_named_below_the_plot() -> None:
    assert "Not drawn, as not both were measured: W8A16 rtn." in _text(samples.partial())


@pytest.mark.parametrize("values", [[9.1, 11.5], [0.001, 0.0013], [7.0, 7.0], [8.0, 5000.0], [0.0, 3.0], [1.0, 6.5]])
def test_ticks_are_round_few_and_inside(values: list[float]) -> None:
    axis = PlotAxis.around(values, 0, 100)
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 12
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)
    assert all(0 <= axis.at(value) <= 100 for value in values)


def test_layers_are_worst_first_with_the_rest_folded_and_unreached_ones_said() -> None:
    markup = page(samples.full())
    charts = re.findall(r'<div class="layers">(.*?)</div>', markup, re.S)
    assert len(charts) == 2
    shown, folded = charts[0].split("<details", 1)
    assert shown.count("<li>") == 20
    assert folded.count("<li>") == len(samples.layers(0.11)) - 20
    assert "no calibration token reached it" in shown
    widths = [float(w) for w in re.findall(r'rect width="([\d.]+)%"', shown)]
    assert len(widths) == 19
    assert widths == sorted(widths, reverse=True)


def test_segments_of_a_bar_are_the_shares_of_its_time() -> None:
    markup = page(samples.full())
    bar = re.search(r'<svg class="stack".*?</svg>', markup, re.S)
    assert bar is not None
    widths = [float(w) for w in re.findall(r'<rect class="hue\d" x="[\d.]+%" width="([\d.]+)%"', bar[0])]
    parts = samples.full().models[0].speed.decode_time  # type: ignore[union-attr]
    assert [w / sum(widths) for w in widths] == pytest.approx([p.seconds * 7.9 for p in parts], abs=1e-4)


def test_samples_mark_where_they_leave_the_baseline_and_equal_ones_share_a_column() -> None:
    markup = page(samples.full())
    columns = re.findall(r'<article class="sample">(.*?)</article>', markup, re.S)
    assert len(columns) == 4, "two prompts, and two different texts for each"
    assert "<ins" not in columns[0]
    assert "W8A16 rtn" in columns[0]
    assert re.search(r"sluice for <ins[^>]*><span[^>]*>\[differs from here\] </span>guests\.</ins>", columns[1])


def test_every_number_has_a_row_for_each_model_and_metric() -> None:
    markup = page(samples.full())
    table = markup[markup.index('aria-label="Every number"') :]
    rows = re.findall(r"<tr.*?</tr>", table[: table.index("</table>")], re.S)
    decodes = [r for r in rows if '<th scope="row">decode</th>' in r]
    assert len(decodes) == 4
    assert '<td class="n" data-sort="22.91">22.91</td>' in decodes[1]
    assert "2.90×" in decodes[1]
    assert "×" not in decodes[0]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.speedup(2.9), "2.9× faster"),
        (wording.speedup(1 / 1.3), "1.3× slower"),
        (wording.speedup(0.999), "same speed"),
        (wording.speedup(1.04), "1.04× faster"),
        (wording.shrinkage(0.3), "3.3× smaller"),
        (wording.shrinkage(1.5), "1.5× larger"),
        (wording.percent_change(1.018), "+1.8%"),
        (wording.percent_change(0.98), "−2.0%"),
        (wording.percent_change(1.0), "0.00%"),
        (wording.percent_change(1.0003), "+0.03%"),
        (wording.percent_change(40.0), "40×"),
        (wording.signed(-0.0123), "−0.012"),
        (wording.signed(0.00001), "0.000"),
        (wording.bytes_(726_000_000), "726.0 MB"),
        (wording.rate(41.23), "41.2 tokens/s"),
        (wording.rate(1234.4), "1,234 tokens/s"),
        (wording.seconds(0.0341), "34.1 ms"),
        (wording.seconds(2.4), "2.40 s"),
        (wording.seconds(740), "12 min 20 s"),
        (wording.seconds(0.000005), "5.00 µs"),
        (wording.number(0.99999), "1.00"),
        (wording.number(0.0), "0"),
        (wording.number(-2.5), "−2.50"),
        (wording.interval((0.0331, 0.035), wording.seconds), "33.1 to 35.0 ms"),
        (wording.interval((0.0009, 0.0011), wording.seconds), "900 µs to 1.10 ms"),
        (wording.interval(None, wording.number), ""),
        (wording.spread(Spread(median=1.0, values=[1.0]), wording.number), ""),
        (wording.p_value(0.0004), "p < 0.001"),
    ],
)
def test_numbers_are_said_in_words(said: str, expected: str) -> None:
    assert said == expected


# In a browser


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``opened(report, width=…)`` shows a report; whatever the page complains of or asks for fails the test."""
    troubles: list[str] = []
    requests: list[str] = []
    contexts = []
    file = tmp_path / "report.html"

    def show(report: ReportData, width: int = 1280, **options: Any) -> Any:
        file.write_text(page(report), encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        shown = contexts[-1].new_page()
        shown.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        shown.on("request", lambda request: requests.append(request.url))
        shown.goto(file.as_uri())
        return shown

    yield show
    for context in contexts:
        context.close()
    assert not troubles
    assert {url for url in requests if url not in ("data:,", file.as_uri())} == set()


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("make", ALL)
def test_the_page_is_quiet_offline_and_no_wider_than_the_screen(
    opened: Callable[..., Any], make: Callable[[], ReportData], width: int
) -> None:
    shown = opened(make(), width)
    shown.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator("h1").is_visible()


def test_the_page_says_the_same_without_javascript(opened: Callable[..., Any]) -> None:
    shown = opened(samples.full(), java_script_enabled=False)
    assert shown.locator(".pareto:visible .point").count() == 4
    assert "1.3× slower" in shown.locator("header").inner_text()
    assert shown.locator("#download").is_hidden()


def _column(table: Any, index: int) -> list[float]:
    return [float(v) for v in table.locator(f"tbody tr > :nth-child({index})").evaluate_all(
        "cells => cells.filter((c) => c.dataset.sort !== undefined).map((c) => c.dataset.sort)"
    )]  # fmt: skip


def test_a_click_on_a_header_sorts_rows_by_number_both_ways(opened: Callable[..., Any]) -> None:
    shown = opened(samples.full())
    table = shown.locator('table[aria-label="Models"]')
    head = table.locator("th", has_text="checkpoint")
    before = _column(table, 3)
    assert before not in (sorted(before), sorted(before, reverse=True))
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert _column(table, 3) == sorted(before)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert _column(table, 3) == sorted(before, reverse=True)
    # The baseline has no quantized linears: its empty cell stays last both ways.
    linear = table.locator("th", has_text="in quantized linears").locator("button")
    for _ in range(2):
        linear.click()
        assert "Llama-3.2-1B" in table.locator("tbody tr").last.inner_text()


def test_sorting_works_by_keyboard(opened: Callable[..., Any]) -> None:
    shown = opened(samples.full())
    shown.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    table = shown.locator('table[aria-label="Every number"]')
    before = _column(table, 3)
    table.locator("th", has_text="metric").locator("button").focus()
    shown.keyboard.press("Tab")
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    assert table.locator("th[aria-sort]").inner_text().startswith("value")
    assert _column(table, 3) == sorted(before)
    shown.keyboard.press("Space")
    assert _column(table, 3) == sorted(before, reverse=True)


@pytest.mark.parametrize("width", [375, 1280])
def test_a_point_of_the_plot_shows_its_numbers_and_highlights_its_rows(opened: Callable[..., Any], width: int) -> None:
    shown = opened(samples.full(), width)
    tooltip = shown.locator(".tooltip")
    point = shown.locator(".pareto:visible .point[data-model='1']")
    assert tooltip.is_hidden()
    point.locator(".reach").hover()
    assert tooltip.is_visible()
    for words in ("W4A16 gptq", "22.9 tokens/s", "perplexity 9.94", "726.0 MB"):
        assert words in tooltip.inner_text()
    lit = shown.locator("table[aria-label='Models'] tr.lit")
    assert lit.count() == 1
    assert "W4A16 gptq" in lit.inner_text()
    box = tooltip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    shown.mouse.move(2, 2)
    assert tooltip.is_hidden()
    shown.locator(".pareto:visible .point[data-model='3']").focus()
    assert "W3A16 hqq" in tooltip.inner_text()
    shown.keyboard.press("Escape")
    assert tooltip.is_hidden()


def test_a_dark_system_has_a_dark_page(opened: Callable[..., Any]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        shown = opened(samples.full(), color_scheme=scheme)
        colours[scheme] = shown.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.pareto .name')).fill].map((c) =>"
            " c.match(/[\\d.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0) / 765)"
        )
    assert colours["light"][0] > 0.9
    assert colours["light"][1] < 0.3
    assert colours["dark"][0] < 0.2
    assert colours["dark"][1] > 0.7


def test_hostile_strings_run_nothing_and_are_read_as_text(opened: Callable[..., Any]) -> None:
    shown = opened(samples.hostile())
    assert shown.locator("img").count() == 0
    assert shown.locator(".headline h2 bdi").inner_text() == "<img src=x onerror=alert(1)>"
    assert shown.title() == "</title><script>alert(5)</script>"
    shown.locator(".pareto:visible .point[data-model='1'] .reach").hover()
    assert "<img src=x onerror=alert(1)>" in shown.locator(".tooltip").inner_text()


def test_the_download_is_the_report(opened: Callable[..., Any], tmp_path: Path) -> None:
    shown = opened(samples.full())
    with shown.expect_download() as download:
        shown.locator("#download").click()
    download.value.save_as(tmp_path / "got.json")
    assert json.loads((tmp_path / "got.json").read_text()) == samples.full().as_data()
