"""What HTTP costs: the same closed loop of clients on the bare engine and on the server, by turns, each in a process of its own.

    python -m benchmarks.server.overhead

Time to the first token of one client and of eight, and the throughput of many, on smelt-6m in bfloat16 and on a Llama
of a billion weights in W4A16 (random ones, with smelt-6m's tokenizer). The clients of the server run in this process, so on the same cores; those of the bare engine are asyncio tasks beside
it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smelt.models.directory.find import find_checkpoint
from smelt.quant.scheme import resolve
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.engine.setup.loading import in_own_thread
from smelt.runtime.measure.calibrate import Shape
from smelt.runtime.measure.random_checkpoint import write_random_checkpoint

from ..common import parser, save, saved
from .started import smelt_server

_PROMPT = 64
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class ClientLoad:
    """What a model is asked.

    Attributes:
        name: of the model.
        first: how often one client asks for 8 tokens, and how often each of eight.
        many: clients that ask at once.
        requests: of each.
        output: tokens of each.
    """

    name: str
    first: tuple[int, int]
    many: int
    requests: int
    output: int


LOADS = (ClientLoad("smelt-6m", (100, 25), 64, 4, 128), ClientLoad("1B shape, W4A16", (10, 2), 32, 1, 32))
# TinyLlama-1.1B's but for the vocabulary.
LARGE = Shape(2048, 5632, 22, 32, 4, 4096)

# A request of so many tokens; returns when its first token came, and when its last.
Ask = Callable[[list[int], int], Awaitable[tuple[float, float]]]


async def _loop(asks: list[Ask], requests: int, output: int, seed: int) -> dict[str, float]:
    """Each client asks one after another."""
    draw = random.Random(seed)
    firsts: list[float] = []

    async def client(ask: Ask) -> None:
        for _ in range(requests):
            prompt = [draw.randrange(5, 4000) for _ in range(_PROMPT)]
            began = time.perf_counter()
            first, _ = await ask(prompt, output)
            firsts.append(first - began)

    began = time.perf_counter()
    await asyncio.gather(*(client(ask) for ask in asks))
    seconds = time.perf_counter() - began
    return {"first_p50": statistics.median(firsts), "tokens_per_second": len(asks) * requests * output / seconds}


async def _all(clients: Callable[[int], Awaitable[list[Ask]]], load: ClientLoad) -> dict[str, float]:
    found: dict[str, float] = {}
    await _loop(await clients(load.many), 1, load.output, 0)  # buffers are allocated, and the cache's memory is touched
    for count, requests in zip((1, 8), load.first, strict=True):
        done = await _loop(await clients(count), requests, 8, count)
        found[f"first_p50_of_{count}"] = done["first_p50"]
    done = await _loop(await clients(load.many), load.requests, load.output, 1)
    return {**found, "tokens_per_second": done["tokens_per_second"]}


def bare(model: str, load: ClientLoad) -> dict[str, float]:
    """The engine without HTTP."""
    path = find_checkpoint(model).path
    engine = in_own_thread(lambda: Engine(path, max_num_seqs=load.many, quiet=True))

    async def ask(prompt: list[int], output: int) -> tuple[float, float]:
        first = 0.0
        async for _ in engine.start(prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)):
            first = first or time.perf_counter()
        return first, time.perf_counter()

    async def clients(count: int) -> list[Ask]:
        return [ask] * count

    return asyncio.run(_all(clients, load))


def served(model: str, load: ClientLoad, streams: bool, *options: str) -> dict[str, float]:
    """The server."""
    with smelt_server(model, "--max-num-seqs", str(load.many), *options) as server:
        parts = urlsplit(server.url)

        async def clients(count: int) -> list[Ask]:
            return [await _client(parts.hostname or "", parts.port or 0, streams) for _ in range(count)]

        return asyncio.run(_all(clients, load))


async def _client(host: str, port: int, streams: bool) -> Ask:
    reader, writer = await asyncio.open_connection(host, port)

    async def ask(prompt: list[int], output: int) -> tuple[float, float]:
        fields = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": streams}
        body = json.dumps(fields).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not streams:
            length = _LENGTH.search(head)
            assert length is not None, head
            await reader.readexactly(int(length[1]))
            return (now := time.perf_counter()), now
        first, seen = 0.0, b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen = seen[-16:] + await reader.read(1 << 16)
            first = first or time.perf_counter()
        return first, time.perf_counter()

    return ask


def write_large(path: Path) -> Path:
    """The larger model, where it says; returns that."""
    write_random_checkpoint(path, LARGE.config(), resolve("W4A16", 128))
    for tokenizer in find_checkpoint("builtin:smelt-6m").path.glob("tokenizer*"):
        shutil.copy(tokenizer, path)
    return path


def measure(model: str, load: ClientLoad, turns: int) -> dict[str, Any]:
    """One model's medians, and what they are of."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(turns):
        command = [sys.executable, "-m", "benchmarks.server.overhead", "--bare", model, load.name]
        engine = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.setdefault("bare engine", []).append(json.loads(engine.stdout))
        runs.setdefault("streams", []).append(served(model, load, True))
        runs.setdefault("streams, an event each 8 tokens", []).append(
            served(model, load, True, "--stream-interval", "8")
        )
        runs.setdefault("whole answers", []).append(served(model, load, False))
        print({name: found[-1] for name, found in runs.items()}, flush=True)
    medians: dict[str, dict[str, Any]] = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]} for name, found in runs.items()
    }
    for found in medians.values():
        found["throughput_of_bare"] = found["tokens_per_second"] / medians["bare engine"]["tokens_per_second"]
    return {"many": load.many, "medians": medians, "runs": runs}


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument(
        "--bare", nargs=2, metavar=("MODEL", "LOAD"), help="Measure an engine alone, and print it as JSON."
    )
    options.add_argument(
        "--only", choices=[load.name for load in LOADS], help="Measure one model; the other's results are kept."
    )
    given = options.parse_args()
    if given.bare:
        model, name = given.bare
        print(json.dumps(bare(model, next(load for load in LOADS if load.name == name))))
        return
    small, large = LOADS
    found = saved("http_overhead") or {} if given.only else {}
    if given.only in (None, small.name):
        found[small.name] = measure("builtin:smelt-6m", small, given.turns)
    if given.only in (None, large.name):
        with tempfile.TemporaryDirectory() as scratch:
            found[large.name] = measure(str(write_large(Path(scratch) / "large")), large, given.turns)
    print(json.dumps({name: each["medians"] for name, each in found.items()}, indent=2))
    print(save("http_overhead", "python -m benchmarks.server.overhead", found))


if __name__ == "__main__":
    main()
