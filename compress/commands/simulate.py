"""``smelt simulate``: what scheduling policies and placements do to a trace, on a device that need not be here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.cache_types import kv_cache_dtype_help
from ...runtime.scheduling.policies.table import POLICIES
from ...system.errors import SmeltError
from ...system.progress import Progress
from .common.outcome import make_directory, reporting_errors

if TYPE_CHECKING:
    from ...quant.scheme import Scheme


@reporting_errors
def simulate(
    model: Annotated[str, typer.Option(help="A directory with config.json, a hub name or builtin:smelt-6m.")],
    device: Annotated[
        str,
        typer.Option(help="A shipped device, a YAML file of constants, a calibration (JSON), or cpu: this machine."),
    ],
    trace: Annotated[Path | None, typer.Option(help="Azure's CSV or Mooncake's JSONL.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Without a trace: lengths of prompts, such as lognormal:300,0.9 or fixed:512.")
    ] = None,
    outputs: Annotated[str | None, typer.Option(help="The same of outputs.")] = None,
    arrivals: Annotated[float, typer.Option(help="Without a trace: arrivals per second, at random.", min=1e-6)] = 1.0,
    requests: Annotated[
        int | None, typer.Option(help="Number of requests; a shorter trace is repeated.", min=1, max=10**7)
    ] = None,
    rate: Annotated[float, typer.Option(help="Scales the arrival rate: 2 halves all pauses.", min=1e-6)] = 1.0,
    policy: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(POLICIES)}.")] = None,
    placement: Annotated[
        str,
        typer.Option(help="single, replicas:N, tensor:N, pipeline:N, disaggregated:P+D or hybrid:P+D,LENGTH."),
    ] = "single",
    scheme: Annotated[str | None, typer.Option(help="Scheme of a plain model's linears, such as W4A16.")] = None,
    group_size: Annotated[int | None, typer.Option(help="The scheme's group size.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help=kv_cache_dtype_help())] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step.", min=1)] = 512,
    block_size: Annotated[int, typer.Option(help="Positions in a cache block.", min=1)] = 16,
    memory_utilization: Annotated[float, typer.Option(help="Share of the memory to use.", min=0.06, max=1.0)] = 0.9,
    max_model_len: Annotated[int | None, typer.Option(help="Leave out longer requests.", min=2)] = None,
    host_memory: Annotated[
        float, typer.Option(help="GB of host memory for swapped and evicted blocks.", min=0.0)
    ] = 0.0,
    swap: Annotated[str, typer.Option(help="auto, swap or recompute.")] = "auto",
    transfer_mb: Annotated[float, typer.Option(help="MB of a contiguous transfer when swapping.", min=1e-3)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of random lengths and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write simulation.json and simulation.html there.")] = None,
) -> int:
    """Simulate a trace of requests with the engine's own scheduler on a virtual clock.

    Examples:

        smelt simulate --trace AzureLLMInferenceTrace_conv.csv --model ./llama-3-8b --device h100-sxm --policy fcfs --policy mlfq

        smelt simulate --trace mooncake_conversation_trace.jsonl --model ./llama-3-8b --scheme W4A16 --device h100-sxm --host-memory 64

        smelt simulate --prompts lognormal:300,0.9 --outputs lognormal:200,1.0 --arrivals 4 --model ./llama-3-8b --device a100-sxm-80gb --placement disaggregated:1+3

        smelt simulate --trace trace.csv --model builtin:smelt-6m --device cpu --output runs/simulation
    """
    from ...models.directory.find import find_configuration
    from ...runtime.costs.model_size import model_size
    from ...runtime.simulate.scenarios.scenario import Scenario, SimulatedLoad, run, table

    begun = time.perf_counter()
    progress = Progress(True)
    scenario = Scenario(
        size=model_size(
            find_configuration(model), scheme=named_scheme(scheme, group_size), kv_cache_dtype=kv_cache_dtype
        ),
        device=device,
        placement=placement,
        policies=tuple(policy or ["fcfs"]),
        load=SimulatedLoad(
            trace=trace, prompts=prompts, outputs=outputs, arrivals=arrivals, requests=requests, rate=rate, seed=seed
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        memory_utilization=memory_utilization,
        max_model_len=max_model_len,
        host_memory_bytes=int(host_memory * 1e9),
        swap=swap,
        transfer_bytes=int(transfer_mb * 1e6),
    )
    found = run(scenario, log=progress.say)
    data = found.as_data()
    if output is not None:
        from ...system.storage.files import write_text
        from ..reporting.simulation_page import simulation_page

        make_directory(output)
        write_text(output / "simulation.html", simulation_page(found))
        write_text(output / "simulation.json", json.dumps(data, indent=2) + "\n")
    print(json.dumps(data, indent=2) if as_json else table(found))
    print(f"simulated in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    if output is not None:
        print(f"written: {output / 'simulation.html'}", file=sys.stderr)
    return 0


def named_scheme(name: str | None, group_size: int | None) -> Scheme | None:
    """A scheme from the command line.

    Raises:
        SmeltError: there is none of that name, or it has no such group size.
    """
    if name is None:
        if group_size is not None:
            raise SmeltError("--group-size belongs to a scheme; give --scheme, too")
        return None
    from ...quant.scheme import resolve

    try:
        return resolve(name, group_size)
    except ValueError as error:
        raise SmeltError(f"--scheme: {error}") from None
