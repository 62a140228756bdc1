"""``smelt bench``: a checkpoint's speed on this machine, or a server's."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...runtime import EngineConfig
from ...system.errors import SmeltError
from ...system.progress import Progress
from .common.engine_options import options_given, with_engine_options
from .common.outcome import reporting_errors


@reporting_errors
@with_engine_options("enable_prefix_caching")
def bench(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub name or builtin:smelt-6m. Not for --server and --calibrate."),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each request.", min=1)] = 128,
    output: Annotated[int, typer.Option(help="Tokens generated per request.", min=2)] = 32,
    concurrency: Annotated[list[int] | None, typer.Option(help="Concurrent requests. Repeatable.", min=1)] = None,
    requests: Annotated[int, typer.Option(help="Requests per load, at least its concurrency.", min=1, max=10**6)] = 16,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a trace: Azure's CSV or Mooncake's JSONL, whose shared prefixes are shared with --server; an engine is measured without prefix caching."
        ),
    ] = None,
    trace_requests: Annotated[int, typer.Option(help="Number of requests from the trace.", min=1)] = 32,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="What each GPU fusion saves: launches, bytes, and time if there is a GPU."),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Time steps of random models on this machine and write what smelt simulate and smelt plan need to FILE."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Measure a server with OpenAI's API instead, such as http://localhost:8000."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which of the server's models, if it serves several.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", envvar="SMELT_API_KEY", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    *,
    engine: EngineConfig,
) -> int:
    """Measure a checkpoint's speed on this machine, and how close it comes to the machine's limits; or a server's speed.

    Examples:

        smelt bench runs/quickstart/checkpoint

        smelt bench ./my-llama --prompt 512 --output 64 --concurrency 1 --concurrency 8 --json

        smelt bench ./my-llama --trace AzureLLMInferenceTrace_conv.csv

        smelt bench ./my-llama --policy sarathi --concurrency 16

        smelt bench ./my-llama --compile

        smelt bench ./my-llama --ablate

        smelt bench --server http://localhost:8000 --prompt 512 --output 64 --concurrency 8

        smelt bench --calibrate this-machine.json
    """
    loads = concurrency or ([] if trace else [1, 4, 16])
    of_engines = dict.fromkeys(options_given(engine), True)
    if server is not None:
        unused = {
            "CHECKPOINT": checkpoint is not None,
            "--calibrate": calibrate is not None,
            "--ablate": ablate,
        }
        _refuse(unused | of_engines, "--server measures what a server does with its own options")
        return _bench_server(
            server, model, api_key, prompt, output, loads, requests, (trace, trace_requests), as_json=as_json
        )
    if model is not None:
        raise SmeltError("--model names one of a server's models; give the server with --server, or leave it out")
    if calibrate is not None:
        return _calibrate(calibrate)
    if checkpoint is None:
        raise SmeltError(
            "give a checkpoint to measure, or --calibrate FILE to calibrate this machine, or --server URL to measure a server"
        )
    if ablate:
        unused = {"--trace": trace is not None, "--concurrency": concurrency is not None}
        unused |= {
            name: used for name, used in of_engines.items() if name not in ("--dtype", "--kv-cache-dtype", "--device")
        }
        _refuse(unused, "--ablate takes one step of a GPU apart")
        return _ablate(checkpoint, prompt, output, engine.dtype, engine.kv_cache_dtype, as_json)
    most = max([engine.max_num_seqs, *loads])
    config = replace(engine, max_num_seqs=most, enable_prefix_caching=False)
    from ...models.directory.find import find_checkpoint
    from ...runtime.engine.engine import Engine
    from ...runtime.measure.bench import measure, table
    from ...runtime.requests.trace import read_trace

    loaded = Engine(find_checkpoint(checkpoint).path, config)
    found = measure(
        loaded,
        prompt=prompt,
        output=output,
        concurrencies=loads,
        requests=requests,
        trace=read_trace(trace, trace_requests, loaded.max_model_len) if trace else None,
        log=Progress(True).say,
    )
    print(json.dumps({"checkpoint": checkpoint, **found.as_data()}, indent=2) if as_json else table(found))
    return 0


def _refuse(unused: dict[str, bool], why: str) -> None:
    given = [name for name, is_given in unused.items() if is_given]
    if given:
        raise SmeltError(f"{why} and does not use {', '.join(given)}; leave them out")


def _bench_server(
    server: str,
    model: str | None,
    api_key: str | None,
    prompt: int,
    output: int,
    loads: list[int],
    requests: int,
    trace: tuple[Path | None, int],
    *,
    as_json: bool,
) -> int:
    from ...runtime.measure.server_bench import CONNECTIONS, ServerBench, measure_server, server_table
    from ...runtime.requests.trace import read_trace

    path, most = trace
    with ServerBench(server, model, api_key, connections=max([CONNECTIONS, *loads])) as bench:
        arrivals = None if path is None else read_trace(path, most, bench.info.longest or sys.maxsize)
        found = measure_server(
            bench,
            prompt=prompt,
            output=output,
            concurrencies=loads,
            requests=requests,
            trace=arrivals,
            log=Progress(True).say,
        )
    print(json.dumps(found.as_data(), indent=2) if as_json else server_table(found))
    return 0


def _ablate(checkpoint: str, prompt: int, output: int, dtype: str, kv_cache_dtype: str, as_json: bool) -> int:
    from ...models.directory.find import find_checkpoint
    from ...runtime.measure.ablation import ablate, table

    found = ablate(
        find_checkpoint(checkpoint).path,
        prompt=prompt,
        output=output,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        log=Progress(True).say,
    )
    print(json.dumps({"checkpoint": checkpoint, **found.as_data()}, indent=2) if as_json else table(found))
    return 0


def _calibrate(path: Path) -> int:
    from ...runtime.costs.device_cost import own_calibration
    from ...runtime.measure.calibrate import calibrate, table

    if not path.parent.is_dir():
        raise SmeltError(f"--calibrate: {path.parent} is not a directory; create it, or choose another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SmeltError(f"--calibrate: {path} cannot be written; choose another file")
    found = calibrate(command=f"smelt bench --calibrate {path.name}", log=Progress(True).say)
    kept = own_calibration()
    kept.parent.mkdir(parents=True, exist_ok=True)
    found.write(kept)
    found.write(path)
    print(table(found))
    print(f"written: {path}; smelt simulate --device cpu uses it from now on", file=sys.stderr)
    return 0
