"""Many streams for minutes, some of which go away and some of which are wrong: what leaks, and whether tokens are right.

    python -m benchmarks.server.load_test --minutes 10

200 clients send prompts of ragged lengths, one after another, and read streams; 1 in 10 closes its connection in the middle, 1 in 20
sends what is no request. In float32, so that greedy tokens do not depend on what else runs: each answer is compared with the one of
the engine alone. Memory, descriptors and cache blocks are read before, during and after.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
from smelt.models.directory.find import find_checkpoint
from smelt.runtime import Engine, SamplingParams

from ..common import parser, save
from .started import Started, smelt_server

_STREAMS = 200
_PROMPTS = 96
_LEAVES, _WRONG = 0.10, 0.05
_MODEL = "builtin:smelt-6m"
_WRONG_BODIES = (
    b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "nothing": 1}', b"\xff\xfe",
    b'{"prompt": "' + b"word " * 5000 + b'"}', b'{"model": "other", "prompt": "a"}',
)  # fmt: skip


@dataclass
class Counts:
    """What happened."""

    answered: int = 0
    left: int = 0
    refused: int = 0
    wrong_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    first: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """A request and its answer."""

    body: bytes
    text: str


def asks() -> list[Ask]:
    """Requests of ragged lengths, and what the engine alone answers."""
    draw = random.Random(0)
    engine = Engine(find_checkpoint(_MODEL).path, dtype="float32", quiet=True, enable_prefix_caching=False)
    found = []
    for _ in range(_PROMPTS):
        prompt = [draw.randrange(5, 4000) for _ in range(draw.choice([1, 8, 40, 150, 400, 700]))]
        count = draw.choice([1, 5, 20, 60, 120, 250])
        (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        found.append(Ask(json.dumps(body).encode(), output.outputs[0].text or ""))
    return found


class Client:
    """One after another, over one connection as long as it lasts."""

    def __init__(self, url: str, known: list[Ask], counts: Counts, seed: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._known, self._counts, self._draw = known, counts, random.Random(seed)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, ends: float) -> None:
        """Until a time."""
        while time.monotonic() < ends:
            try:
                await self._one()
            except (OSError, asyncio.IncompleteReadError) as error:
                self._counts.problems.append(repr(error))
                self._close()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _send(self, body: bytes) -> tuple[asyncio.StreamReader, int]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        return self._reader, int(answer.split(b" ", 2)[1])

    async def _one(self) -> None:
        counts, draw = self._counts, self._draw
        kind = draw.random()
        if kind < _WRONG:
            _, status = await self._send(draw.choice(_WRONG_BODIES))
            self._close()
            if status not in (400, 404):
                counts.problems.append(f"a wrong request got {status}")
            counts.refused += 1
            return
        ask = draw.choice(self._known)
        began = time.perf_counter()
        reader, status = await self._send(ask.body)
        if status != 200:
            counts.problems.append(f"status {status}")
            self._close()
            return
        leaves_after = draw.randrange(1, 20) if kind < _WRONG + _LEAVES else None
        text = ""
        events = 0
        while True:
            size = int(await reader.readline(), 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                break
            if events == 0:
                counts.first.append(time.perf_counter() - began)
            for line in chunk.decode().splitlines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        counts.problems.append(str(event["error"]))
                    else:
                        text += event["choices"][0]["text"]
                    events += 1
            if leaves_after is not None and events >= leaves_after:
                self._close()
                counts.left += 1
                return
        counts.answered += 1
        counts.tokens += events
        counts.wrong_tokens += text != ask.text


async def _load(server: Started, known: list[Ask], minutes: float) -> tuple[Counts, list[dict[str, Any]]]:
    counts = Counts()
    ends = time.monotonic() + 60 * minutes
    clients = [Client(server.url, known, counts, seed).run(ends) for seed in range(_STREAMS)]
    seen: list[dict[str, Any]] = []

    async def watch() -> None:
        began = time.monotonic()
        while True:
            seen.append(
                {"seconds": round(time.monotonic() - began), "memory": server.memory, "descriptors": server.descriptors}
            )
            await asyncio.sleep(15)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*clients)
    watching.cancel()
    return counts, seen


def _gauges(url: str) -> dict[str, float]:
    page = httpx2.get(f"{url}/metrics").text
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    return {
        name: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        for name in wanted
        if line.startswith(f"smelt:{name}{{")
    }


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=10)
    minutes = options.parse_args().minutes
    print("answers of the engine alone")
    known = asks()
    with smelt_server(_MODEL, "--dtype", "float32", "--max-num-seqs", "64") as server:
        idle = {"memory": server.memory, "descriptors": server.descriptors}
        counts, seen = asyncio.run(_load(server, known, minutes))
        time.sleep(2)
        after = {"memory": server.memory, "descriptors": server.descriptors, **_gauges(server.url)}
    # From one reading to the next it changes by tens of megabytes.
    earlier, later = (
        statistics.median(each["memory"] for each in seen if first <= each["seconds"] / (60 * minutes) <= last)
        for first, last in ((0.25, 0.5), (0.75, 1.0))
    )
    results = {
        "streams": _STREAMS,
        "minutes": minutes,
        "answered": counts.answered,
        "left": counts.left,
        "malformed": counts.refused,
        "wrong_tokens": counts.wrong_tokens,
        "problems": counts.problems[:10],
        "problem_count": len(counts.problems),
        "tokens_per_second": round(counts.tokens / (60 * minutes), 1),
        "first_token_p50": round(statistics.median(counts.first), 4),
        "first_token_p99": round(statistics.quantiles(counts.first, n=100)[98], 4),
        "idle": idle,
        "after": after,
        "growth": later - earlier,
        "seen": seen,
    }
    print(json.dumps({key: value for key, value in results.items() if key != "seen"}, indent=2))
    print(save("http_load", f"python -m benchmarks.server.load_test --minutes {minutes:g}", results))


if __name__ == "__main__":
    main()
