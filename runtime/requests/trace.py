"""Recorded request traces: arrival times, lengths and shared prefixes."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from operator import index
from pathlib import Path

from ...system.errors import RuntimeProblem

# Positions that a hash of Mooncake's traces stands for.
PREFIX_BLOCK = 512


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival time (in seconds), prompt length and output length.

    Attributes:
        prefix: for each block of :data:`PREFIX_BLOCK` prompt tokens a number that is equal if all tokens up to its end are; empty
            if unknown.
    """

    at: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()


def read_trace(path: Path, most: int, longest: int) -> list[Arrival]:
    """The first requests of a recorded trace that fit into ``longest`` tokens; the first comes at time 0.

    Azure's CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``) and Mooncake's JSONL (``timestamp`` in
    milliseconds, ``input_length``, ``output_length``, ``hash_ids``) are read.

    Raises:
        RuntimeProblem: the file is not such a trace, or nothing in it fits.
    """
    if path.exists() and not path.is_file():
        raise RuntimeProblem(f"{path}: is not a file; give a trace, Azure's CSV or Mooncake's JSONL")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                rows = [
                    Arrival(_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                    for row in csv.DictReader(file)
                ]
            else:
                records = [json.loads(line) for line in file if line.strip()]
                rows = [
                    Arrival(
                        r["timestamp"] / 1000,
                        index(r["input_length"]),
                        index(r["output_length"]),
                        tuple(map(index, r.get("hash_ids", ()))),
                    )
                    for r in records
                ]
        if not all(math.isfinite(row.at) for row in rows):
            raise ValueError("a time is not finite")
    except OSError as error:
        raise RuntimeProblem(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise RuntimeProblem(
            f"{path}: is not a trace ({type(error).__name__}: {error}); give Azure's CSV or Mooncake's JSONL"
        ) from None
    fitting = [row for row in rows if row.prompt > 0 and row.output > 0 and row.prompt + row.output <= longest][:most]
    if not fitting:
        raise RuntimeProblem(f"{path}: no request of the trace fits into {longest} tokens")
    return [replace(row, at=row.at - fitting[0].at) for row in fitting]


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp[:26]).timestamp()


def repeated(arrivals: list[Arrival], count: int, rate: float = 1.0) -> list[Arrival]:
    """So many requests, at a multiple of the recorded rate; a shorter trace is repeated from its beginning.

    Args:
        arrivals: a trace, in order of time.
        count: how many requests.
        rate: 2 halves all times.
    """
    # The pause before a repetition is the mean one.
    span = arrivals[-1].at * (1 + 1 / max(1, len(arrivals) - 1))
    # A repetition's prompts are others, or nearly all of them would be in the prefix cache.
    marks = 1 + max((mark for each in arrivals for mark in each.prefix), default=0)
    found = []
    for i in range(count):
        time, place = divmod(i, len(arrivals))
        each = arrivals[place]
        prefix = tuple(mark + time * marks for mark in each.prefix)
        found.append(replace(each, at=(each.at + time * span) / rate, prefix=prefix))
    return found
