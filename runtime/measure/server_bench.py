"""A server's speed under the loads of an engine's benchmark, measured by a client."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any

from ...system.errors import RuntimeProblem
from ...system.progress import Log
from ..requests.trace import PREFIX_BLOCK, Arrival
from .load_result import LoadResult, RequestTimes, table_of_loads
from .server_client import ServerClient, ServerProblem, together
from .server_features import ServerFeatures
from .server_info import ServerInfo

# A trace has as many requests at a time as come together, but no process may open any number of connections.
CONNECTIONS = 256
_COMPLETIONS = "/v1/completions"


@dataclass
class ServerBenchResult:
    """A benchmark's result.

    Attributes:
        server: which it was.
        prefill_rate: prompt tokens a second, alone.
        decode_rate: generated tokens a second after the first, alone; None if answers come all at once.
        notes: what was measured otherwise than on an engine.
    """

    server: ServerInfo
    prefill_rate: float
    decode_rate: float | None
    loads: list[LoadResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


class ServerBench:
    """Puts loads on a server. Use as a context manager; its connections stay open in between.

    Args:
        url: of the server.
        model: one of its models; may be left out if there is only one.
        api_key: sent with each request.
        connections: the most at a time.

    Attributes:
        info: what the server says of itself.
        features: what it accepts.

    Raises:
        ServerProblem: on entering: it cannot be reached or refuses.
        RuntimeProblem: on entering: it does not serve the model.
    """

    info: ServerInfo
    features: ServerFeatures

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, *, connections: int = CONNECTIONS
    ) -> None:
        self._client = ServerClient(url, api_key, connections=connections)
        self._model = model
        self._runner = asyncio.Runner()
        self._short = self._together = 0

    def __enter__(self) -> ServerBench:
        try:
            self.info, self.features = self._runner.run(self._ask())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        try:
            self._runner.run(self._client.__aexit__(None, None, None))
        finally:
            self._runner.close()

    async def _ask(self) -> tuple[ServerInfo, ServerFeatures]:
        info = await ServerInfo.ask(self._client, self._model)
        return info, await ServerFeatures.probe(self._client, info.model)

    @property
    def notes(self) -> list[str]:
        """What was measured otherwise than on an engine, in sentences whose subject is left out."""
        found = self.features.notes
        if self._short:
            found.append(f"ended {self._short} outputs before they had the length that was asked for")
        if self._together:
            between = "0" if self.features.counts == "parts" else "each answer's mean"
            found.append(f"sent several tokens of {self._together} answers at once: the time between them is {between}")
        return found

    def run_load(self, name: str, arrivals: Sequence[Arrival], at_once: int | None) -> LoadResult:
        """Send requests at their times, or keep so many at once.

        Args:
            name: of the load.
            arrivals: random prompts are made for them, others each time: a server may still have those of earlier runs in its cache. They
                share the prefixes that a trace says.
            at_once: how many to keep running; None to follow the arrivals' times.

        Raises:
            ServerProblem: the server refused a request or failed on it.
        """
        return self._runner.run(self._load(name, arrivals, at_once))

    def _prompt(self, arrival: Arrival, salt: int) -> list[int] | str:
        """Random, but for what it shares with others of its load."""
        shared = arrival.prefix[: arrival.prompt // PREFIX_BLOCK]
        pieces: list[Any] = [self.features.prompt(PREFIX_BLOCK, random.Random(f"{salt} {each}")) for each in shared]
        rest = arrival.prompt - PREFIX_BLOCK * len(shared)
        pieces += [self.features.prompt(rest)] if rest else []
        return [*chain.from_iterable(pieces)] if self.features.token_ids else " ".join(pieces)

    async def _load(self, name: str, arrivals: Sequence[Arrival], at_once: int | None) -> LoadResult:
        salt = random.SystemRandom().getrandbits(64)
        bodies = [
            self.features.body(self.info.model, self._prompt(arrival, salt), arrival.output) for arrival in arrivals
        ]
        answered: list[RequestTimes] = []
        waiting = iter(zip(arrivals, bodies, strict=True))

        async def keep_one() -> None:
            for arrival, body in waiting:
                answered.append(await self._answered(arrival, body, time.perf_counter()))

        async def at_its_time(arrival: Arrival, body: bytes) -> None:
            await asyncio.sleep(max(0.0, begun + arrival.at - time.perf_counter()))
            answered.append(await self._answered(arrival, body, begun + arrival.at))

        begun = time.perf_counter()
        works: list[Coroutine[Any, Any, None]] = (
            [keep_one() for _ in range(at_once)] if at_once else [at_its_time(*each) for each in waiting]
        )
        await together(works)
        return LoadResult.of(name, answered, time.perf_counter() - begun)

    async def _answered(self, arrival: Arrival, body: bytes, came: float) -> RequestTimes:
        parts: list[float] = []
        counted: list[float] = []
        usage: dict[str, Any] = {}
        ends_empty = False
        async for chunk in self._client.stream(_COMPLETIONS, body):
            now = time.perf_counter()
            usage = chunk.get("usage") or usage
            if self.features.counts == "parts":
                counted += [now] * ((usage.get("completion_tokens") or 0) - len(counted))
            for choice in chunk.get("choices") or ():
                parts.append(now)
                # Some servers say why an answer ended in a part without a token.
                ends_empty = bool(choice.get("finish_reason")) and not choice.get("text")
        count = usage.get("completion_tokens")
        if count is None:
            count = len(parts) - ends_empty
        if not parts or count < 1:
            raise ServerProblem(f"{self.info.url}: answered without a token; its log may say why")
        if ends_empty and count < len(parts):
            parts.pop()
        self._together += count != len(parts)
        if len(counted) == count:
            parts = counted
        elif count != len(parts):
            parts = _spread(parts[0], parts[-1], count)
        self._short += count < arrival.output
        prompt = arrival.prompt if self.features.token_ids else usage.get("prompt_tokens") or arrival.prompt
        return RequestTimes(came, prompt, parts)


def _spread(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * place / max(1, count - 1) for place in range(count)]


def measure_server(
    bench: ServerBench,
    *,
    prompt: int,
    output: int,
    concurrencies: list[int],
    requests: int,
    trace: list[Arrival] | None = None,
    repeats: int = 5,
    log: Log = lambda _: None,
) -> ServerBenchResult:
    """Measure a server as :func:`.bench.measure` does an engine.

    Args:
        bench: that has been entered; nobody else should use the server.
        prompt, output: lengths of the fixed shape.
        concurrencies: how many requests to keep at once, one load each.
        requests: how many requests a load has, at least its concurrency.
        trace: arrivals to replay as one more load.
        repeats: of the single-request measurements, of which medians are reported.
        log: gets messages for the user.

    Raises:
        RuntimeProblem: the lengths exceed the server's.
        ServerProblem: it refused a request or failed on it.
    """
    longest = bench.info.longest
    if longest is not None and prompt + output > longest:
        raise RuntimeProblem(
            f"a prompt of {prompt} tokens and {output} to generate exceed the server's context length of {longest}; lower them"
        )
    log("warming up")
    bench.run_load("warm up", [Arrival(0, prompt, min(output, 8))], 1)
    alone = []
    for i in range(repeats):
        log(f"one request, {i + 1} of {repeats}")
        alone.append(bench.run_load("alone", [Arrival(0, prompt, output)], 1))
    first = statistics.median(load.first_token_p50 for load in alone)
    prompts = statistics.median(load.prompt_tokens for load in alone)
    rates = [load.decode_rate for load in alone if load.decode_rate is not None]
    found = ServerBenchResult(bench.info, prompts / first, statistics.median(rates) if rates else None)
    for concurrency in concurrencies:
        log(f"{concurrency} at once")
        arrivals = [Arrival(0, prompt, output)] * max(requests, concurrency)
        found.loads.append(bench.run_load(f"{concurrency} at once", arrivals, concurrency))
    if trace:
        log("the trace")
        found.loads.append(bench.run_load("trace", trace, None))
    found.notes = bench.notes
    return found


def server_table(found: ServerBenchResult) -> str:
    """The result for a terminal."""
    lines = [
        f"server    {found.server.full_name} at {found.server.url}, model {found.server.model}",
        f"prefill   {found.prefill_rate:.0f} tokens/s alone",
        "decode    -" if found.decode_rate is None else f"decode    {found.decode_rate:.1f} tokens/s alone",
        *(f"note      the server {sentence}" for sentence in found.notes),
    ]
    if found.loads:
        lines += ["", *table_of_loads(found.loads)]
    return "\n".join(lines)
