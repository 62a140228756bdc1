"""What an H100 should reach, and what results say that it did. Arithmetic on rows alone: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .results import Entry

Row = dict[str, Any]
FOUR, BF16 = "W4A16 g128", "torch bf16"
WIDE, SQUARE = 14336, (4096, 4096)
PROMPTS = (4096, 8192, 16384)


def of(entries: list[Entry]) -> list[dict[str, Any]]:
    """Each goal with what is wanted and what was reached, None if that was not measured; ``at_most`` says which way."""
    parts = {entry.part for entry in entries}
    return [goal for part, goal in _all(MeasuredRows(entries)) if part in parts]


def wanted() -> list[dict[str, Any]]:
    """All of them, none reached."""
    return [goal for _, goal in _all(MeasuredRows([]))]


def _all(rows: MeasuredRows) -> list[tuple[str, dict[str, Any]]]:
    listed = [*_decode(rows), *_linears(rows), *_attention(rows), *_serving(rows)]
    return [
        (part, {"goal": goal + (" (at most)" if most else ""), "wanted": aim, "reached": reached, "at_most": most})
        for part, goal, aim, reached, most in listed
    ]


class MeasuredRows:
    """Measured rows by part, and the device's limits."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._of: dict[str, list[Row]] = {}
        for entry in entries:
            rows = ({**entry.about, **row} for row in entry.rows if "not_measured" not in row)
            self._of.setdefault(entry.part, []).extend(rows)
        limits: Row = {}
        for row in self._of.get("ceilings", []):
            limits |= row
        self.copy: float | None = limits.get("copy_bytes_per_s")
        self.read: float | None = limits.get("read_bytes_per_s")
        self.matmul: float | None = limits.get("matmul_per_s")

    def of(self, part: str, **wanted: Any) -> list[Row]:
        """A part's rows with these values."""
        return [row for row in self._of.get(part, []) if all(row.get(key) == value for key, value in wanted.items())]

    def value(self, part: str, name: str, **wanted: Any) -> float | None:
        """The last such row's value."""
        found = [row[name] for row in self.of(part, **wanted) if row.get(name) is not None]
        return found[-1] if found else None

    def of_copy(self, row: Row) -> float | None:
        """The share of the copy's rate at which a row's bytes were moved."""
        return row["bytes"] / (row["microseconds"] * 1e-6) / self.copy if self.copy else None


Goal = tuple[str, str, float, float | None, bool]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _linears(rows: MeasuredRows) -> Iterator[Goal]:
    def share(count: int, fits: Any) -> float | None:
        found = [rows.of_copy(row) for row in rows.of("linears", method=FOUR, rows=count) if fits(row)]
        return min((each for each in found if each is not None), default=None)

    def times(ours: str, theirs: str, *counts: int) -> float | None:
        """The worst over shapes of how many times as fast ours is."""
        others = {
            (row["rows"], row["outputs"], row["columns"], row["gate"]): row["microseconds"]
            for row in rows.of("linears", method=theirs)
        }
        pairs = [
            _ratio(others.get((row["rows"], row["outputs"], row["columns"], row["gate"])), row["microseconds"])
            for row in rows.of("linears", method=ours)
            if row["rows"] in counts
        ]
        return min((pair for pair in pairs if pair is not None), default=None)

    def wide(row: Row) -> bool:
        return max(row["outputs"], row["columns"]) >= WIDE

    def square(row: Row) -> bool:
        return (row["outputs"], row["columns"]) == SQUARE

    for goal, wanted, reached in (
        ("W4A16, 1 row, 14336 wide and more: share of the copy's rate", 0.85, share(1, wide)),
        ("W4A16, 1 row, 4096x4096: share of the copy's rate", 0.60, share(1, square)),
        ("W4A16, 16 rows, 14336 wide and more: share of the copy's rate", 0.75, share(16, wide)),
        ("W4A16, 1 row: times torch int4", 1.2, times(FOUR, "torch int4 g128", 1)),
        ("W4A16, 1 row: times gemlite", 1.2, times(FOUR, "gemlite int4 g128", 1)),
        ("W4A16, 16 rows: times torch bf16", 3.0, times(FOUR, BF16, 16)),
        ("W4A16, 64 rows: times torch bf16", 1.5, times(FOUR, BF16, 64)),
        ("W4A16, 512 rows and more: times torch bf16", 0.9, times(FOUR, BF16, 512, 2048)),
        ("linear_dense bf16, 1 row: times torch bf16", 1.0, times("linear_dense bf16", BF16, 1)),
        (
            "FP8 W8A8, 512 rows and more: times _scaled_mm",
            0.85,
            times("FP8 W8A8, inputs rounded", "torch _scaled_mm e4m3, inputs rounded", 512, 2048),
        ),
        ("FP8 W8A8, 512 rows and more: times torch bf16", 1.4, times("FP8 W8A8", BF16, 512, 2048)),
        ("2:4 W4A16, 1 row: times our dense W4A16", 1.2, times("2:4 W4A16 g128", FOUR, 1)),
    ):
        yield "linears", goal, wanted, reached, False


def _decode(rows: MeasuredRows) -> Iterator[Goal]:
    def rate(stored: str, batch: int, cache: str = "auto") -> float | None:
        return rows.value("decode", "tokens_per_s", format=stored, batch=batch, cache=cache)

    firsts = [row["first"] for row in rows.of("decode") if row.get("first")]
    four = rate("w4a16", 1)
    yield "decode", "8B, batch 1, W4A16: tokens/s", 500.0, four, False
    yield "decode", "8B, batch 1, bf16: tokens/s", 190.0, rate("bf16", 1), False
    with_head = rate("w4a16 and an int8 head", 1, "fp8")
    yield "decode", "8B, batch 1: W4A16, int8 head, fp8 cache, times W4A16", 1.0, _ratio(with_head, four), False
    yield "decode", "8B, batch 64: FP8 W8A8, times bf16", 1.5, _ratio(rate("fp8", 64), rate("bf16", 64)), False
    yield "decode", "8B: first request over later ones", 1.2, max(firsts, default=None), True


def _attention(rows: MeasuredRows) -> Iterator[Goal]:
    def taken(method: str, sequences: int, length: int) -> float | None:
        return rows.value("attention", "microseconds", method=method, sequences=sequences, length=length)

    def share(sequences: int, length: int) -> float | None:
        found = rows.of("attention", method="paged", sequences=sequences, length=length)
        return rows.of_copy(found[-1]) if found else None

    for sequences, length in ((8, 32768), (1, 131072)):
        goal = f"decode attention, {sequences} x {length}: share of the copy's rate"
        yield "attention", goal, 0.85, share(sequences, length), False
    equal = [each for each in (taken("paged", n, 65536 // n) for n in (8, 4, 2, 1)) if each]
    spread = max(equal) / min(equal) if len(equal) == 4 else None
    yield "attention", "8 x 8k to 1 x 64k: slowest over fastest", 1.3, spread, True
    long = taken("paged", 8, 32768)
    for goal, wanted, reached, most in (
        (
            "1 x 64k: times one program a sequence",
            8.0,
            _ratio(taken("unsplit", 1, 65536), taken("paged", 1, 65536)),
            False,
        ),
        ("8 x 32k: paged over contiguous", 1.1, _ratio(long, taken("contiguous", 8, 32768)), True),
        ("8 x 32k: fp8 cache, times bf16", 1.7, _ratio(long, taken("float8", 8, 32768)), False),
        ("8 x 32k: int4 cache, times bf16", 2.5, _ratio(long, taken("int4", 8, 32768)), False),
    ):
        yield "attention", goal, wanted, reached, most
    for length in PROMPTS:
        theirs = [r["microseconds"] for r in rows.of("attention", length=length) if r["method"].startswith("torch")]
        reached = _ratio(min(theirs, default=None), taken("flash", 1, length))
        yield "attention", f"prompt of {length}: share of torch's best", 0.75, reached, False
    unfused = _ratio(taken("unfused", 1, 4096), taken("flash", 1, 4096))
    yield "attention", "prompt of 4096: times unfused", 2.0, unfused, False


def _serving(rows: MeasuredRows) -> Iterator[Goal]:
    for model in ("Qwen3-0.6B", "Llama-3-8B"):

        def rate(method: str, model: str = model) -> float | None:
            return rows.value("serving", "tokens_per_s", model=model, method=method)

        static = rate("static batching, 64 at once")
        for goal, wanted, one, other in (
            ("times transformers' generate_batch", 3.0, rate("engine"), rate("transformers generate_batch")),
            ("times static batching", 2.0, rate("engine"), static),
            ("times static batching, both 64 at once", 2.0, rate("engine, 64 at once"), static),
        ):
            yield "serving", f"256 requests, {model}: {goal}", wanted, _ratio(one, other), False
