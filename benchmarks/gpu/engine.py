"""Part four: the engine on a whole Llama-3-8B with random weights, its first request and its later ones."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from smelt.runtime.kernels.timing import copy_rate, device_lives

from .common import needed, one_line, options, save, told
from .random_checkpoints import LLAMA, QWEN, Size, write

if TYPE_CHECKING:
    from smelt.runtime import Engine

LIMIT_S = 235  # of the ten minutes that a call may take
CONTEXT, GENERATED, MANY, REPEATS = 512, 128, 64, 5


@dataclass(frozen=True)
class Row:
    """One format at one batch.

    Attributes:
        format: of the checkpoint, and of keys and values if that is another.
        batch: sequences at once, each with a prompt of 512 tokens.
        rate: tokens a second of all of them together, the median; None if it was not measured.
        of_copy: the share of the copy's rate at which weights alone were read.
        first: how much longer the first request took than later ones, prompt and tokens together.
        ready: seconds from the checkpoint on the disk to an engine that is warm; kernels are compiled meanwhile unless Triton
            has them from before.
        why: for what was not measured.
    """

    format: str
    batch: int
    rate: float | None = None
    of_copy: float | None = None
    first: float | None = None
    ready: float | None = None
    why: str = ""


# Formats, keys and values, batches; the most telling first, should time run out.
RUNS = (
    ("bf16", "auto", (1, MANY)),
    ("w4a16", "auto", (1,)),
    ("fp8", "auto", (MANY, 1)),
    ("w4a16 and an int8 head", "fp8", (1,)),
)


def main() -> None:
    """Measure, print the table and the goals, save."""
    given = options(__doc__ or "")
    needed("transformers", "compressed_tensors", "psutil")
    begun, size = time.monotonic(), QWEN if given.quick else LLAMA
    copied = copy_rate(torch.device("cuda"))
    rows, path = list[Row](), None
    with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
        reason = ""
        for stored, kept, batches in RUNS[:1] if given.quick else RUNS:
            name = stored if kept == "auto" else f"{stored}, {kept} keys and values"
            if not reason and time.monotonic() - begun > LIMIT_S:
                reason = "out of time"
            found = [Row(name, batch, why=reason) for batch in batches]
            if not reason:
                found = _of_format(Path(folder), size, stored, kept, name, batches, copied)
            for row in found:
                print(line(row), flush=True)
            rows += found
            # No goals for another model.
            goals = [] if given.quick else _goals(rows)
            results = {
                "model": size.name,
                "copy_bytes_per_s": copied,
                "rows": [asdict(r) for r in rows],
                "goals": goals,
            }
            path = save(given, "engine", results)
            if not reason and not device_lives():
                reason = "the device had stopped"
    told([] if given.quick else _goals(rows))
    print(f"\n{time.monotonic() - begun:.0f} s: {path}")


def _of_format(
    folder: Path, size: Size, stored: str, kept: str, name: str, batches: tuple[int, ...], copied: float
) -> list[Row]:
    try:
        path = write(folder, size, stored, torch.device("cuda"))
        try:
            return measured(path, name, kept, batches, "cuda", copied, torch.cuda.synchronize)
        finally:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    except Exception as error:
        return [Row(name, batch, why=one_line(error)) for batch in batches]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measured(
    path: Path,
    name: str,
    kept: str,
    batches: tuple[int, ...],
    device: str,
    copied: float,
    wait: Callable[[], object],
) -> list[Row]:
    """One checkpoint at some batches.

    Args:
        path: of the checkpoint.
        name: of its format.
        kept: how keys and values are kept.
        batches: sequences at once.
        device: where.
        copied: bytes a second of a copy there.
        wait: for the device.
    """
    from smelt.runtime import Engine

    begun = time.perf_counter()
    engine = Engine(
        path,
        device=device,
        kv_dtype=kept,
        max_sequences=max(batches),
        max_length=CONTEXT + GENERATED + 1,
        token_budget=2048,
        share_prefixes=False,
        quiet=True,
    )
    wait()
    ready = time.perf_counter() - begun
    seeds = iter(range(10**6))
    first, *later = (_request(engine, seeds) for _ in range(REPEATS + 1))
    rows = []
    for batch in batches:
        rates = [_rate(engine, batch, seeds) for _ in range(REPEATS)]
        rate = median(rates)
        share = engine.model.bytes_per_token() * rate / batch / copied
        rows.append(Row(name, batch, rate, share, first / median(later), ready))
    return rows


def _added(engine: Engine, seeds: Any) -> str:
    from smelt.runtime import SamplingParams
    from smelt.runtime.workload import random_prompt

    prompt = random_prompt(CONTEXT, engine.model.spec.vocabulary, next(seeds))
    return engine.add_request(prompt, SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True))


def _request(engine: Engine, seeds: Any) -> float:
    """Seconds of one request, from its arrival to its last token."""
    begun = time.perf_counter()
    _added(engine, seeds)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun


def _rate(engine: Engine, batch: int, seeds: Any) -> float:
    """Tokens a second once all sequences have their first."""
    waiting = {_added(engine, seeds) for _ in range(batch)}
    while waiting:
        waiting -= {output.id for output in engine.step()}
    begun, seconds, tokens = time.perf_counter(), 0.0, 0
    while engine.has_work:
        stepped = engine.step()
        if len(stepped) < batch and tokens:
            break  # the first ones are through
        tokens += len(stepped)
        seconds = time.perf_counter() - begun
    while engine.has_work:
        engine.step()
    return tokens / seconds


def _goals(rows: list[Row]) -> list[dict[str, Any]]:
    """The goals for an H100."""
    rate = {(r.format, r.batch): r.rate for r in rows if r.rate}
    eight, plain = rate.get(("fp8", MANY)), rate.get(("bf16", MANY))
    firsts = [r.first for r in rows if r.first]
    return [
        {"goal": goal, "wanted": wanted, "reached": reached}
        for goal, wanted, reached in (
            ("batch 1: bf16 tokens/s", 190.0, rate.get(("bf16", 1))),
            ("batch 1: W4A16 tokens/s", 500.0, rate.get(("w4a16", 1))),
            (
                "batch 1: W4A16, int8 head, fp8 keys and values (more than W4A16)",
                rate.get(("w4a16", 1)) or 500.0,
                rate.get(("w4a16 and an int8 head, fp8 keys and values", 1)),
            ),
            ("batch 64: FP8 W8A8, times bf16", 1.5, eight / plain if eight and plain else None),
            ("first request after a warm start, over later ones (at most)", 1.2, max(firsts, default=None)),
        )
    ]


def line(row: Row) -> str:
    """For the terminal."""
    head = f"{row.format:<48}batch {row.batch:<4}"
    if row.rate is None:
        return f"{head} not measured: {row.why}"
    return f"{head}{row.rate:>9.1f} tok/s{row.of_copy:>7.0%} of copy, first request {row.first:.2f}, ready in {row.ready:.0f} s"


if __name__ == "__main__":
    main()
