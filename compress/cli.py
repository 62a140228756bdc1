"""The command line: ``smelt run``, ``inspect``, ``chat``, ``bench`` and ``schema``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from ..runtime.errors import RuntimeProblem
from .errors import SmeltError
from .interrupts import remembered_interrupts
from .progress import Progress

app = typer.Typer(
    name="smelt",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Make language models smaller, and prove what it cost.

    Try it (no network needed):

    - `smelt run recipes/quickstart.yaml` compresses a bundled model to 4 bits and reports the loss

    - `smelt run recipes/quickstart.yaml --dry-run` says what that would take, and what would fail

    - `smelt run recipes/quickstart.yaml --set model=./my-llama --output runs/mine` does it to your model

    - `smelt inspect runs/quickstart/checkpoint` shows where the bytes are

    - `smelt chat runs/quickstart/checkpoint` talks with it

    - `smelt bench runs/quickstart/checkpoint` measures how fast it runs here

    An interrupted run continues when the same command is given again.
    """,
)

_INTERRUPTED = 130
P = ParamSpec("P")


def main() -> None:
    """Entry point of the ``smelt`` command."""
    app()


def _told(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn what can go wrong into one sentence on standard error and an exit status."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with remembered_interrupts():
                status = command(*args, **kwargs) or 0
        except (SmeltError, RuntimeProblem) as error:
            status = _say(str(error), 1)
        except KeyboardInterrupt:
            status = _say("interrupted; the same command continues where this one stopped", _INTERRUPTED)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
            advice = "the same command continues where this one stopped; --dry-run says what it needs"
            status = _say(f"out of memory; lower calibrate.samples or free some: {advice}", 1)
        raise typer.Exit(status)

    return guarded


def _say(text: str, status: int) -> int:
    for line in text.split("\n"):
        print(f"smelt: {line}", file=sys.stderr)
    return status


@app.command()
@_told
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe, such as recipes/quickstart.yaml.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a field, e.g. `steps.0.quantize.scheme=W8A16`. Repeatable."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the result goes, instead of the recipe's output.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; change nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the plan) as JSON.")] = False,
) -> int:
    """Do what a recipe says, and report what it cost.

    Examples:

        smelt run recipes/quickstart.yaml

        smelt run recipes/quickstart.yaml --set steps.0.quantize.rounding=nearest --output runs/nearest

        smelt run recipes/quickstart.yaml --dry-run --json
    """
    from .recipe import Recipe

    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    loaded = Recipe.load(recipe, overrides)
    if dry_run:
        return _print_plan(loaded, fresh, as_json)
    from .pipeline import run as run_recipe

    result = run_recipe(loaded, fresh=fresh)
    if as_json:
        print(json.dumps({"checkpoint": str(result.checkpoint), "report": result.report.data}, indent=2))
        return 0
    print(result.report.terminal())
    print(f"\ncheckpoint: {result.checkpoint}\nreport:     {result.checkpoint.parent / 'report.md'}")
    return 0


def _print_plan(recipe: Any, fresh: bool, as_json: bool) -> int:
    from .plan import Plan

    plan = Plan.make(recipe, fresh=fresh)
    print(json.dumps(plan.as_data(), indent=2) if as_json else plan.terminal())
    return 1 if plan.problems else 0


@app.command()
@_told
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Show how a checkpoint's tensors are stored, and how much smaller it is than the original.

    Example:

        smelt inspect runs/quickstart/checkpoint
    """
    from .inspection import inspect as look
    from .inspection import terminal

    found = look(checkpoint)
    if as_json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        terminal(found)
    return 0


@app.command()
@_told
def chat(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample among the tokens that together have this probability.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 512,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    max_length: Annotated[int | None, typer.Option(help="The longest conversation, in tokens.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="How keys and values are kept: auto, int8 or fp8.")] = "auto",
    native: Annotated[bool, typer.Option(help="Use Smelt's compiled CPU kernels, or torch's operators.")] = True,
) -> int:
    """Talk with a checkpoint. /reset forgets the conversation, /quit leaves.

    Example:

        smelt chat runs/quickstart/checkpoint --temperature 0.8
    """
    from ..runtime import Engine, SamplingParams
    from ..runtime.chat import Chat, converse

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine = Engine(_directory_of(checkpoint), max_length=max_length, max_sequences=1, kv_dtype=kv_dtype, native=native)
    limit = min(max_tokens, max(1, engine.max_length // 2))
    converse(
        Chat(engine, replace(params, max_tokens=limit), system), input, lambda text: print(text, end="", flush=True)
    )
    return 0


@app.command()
@_told
def bench(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output: Annotated[int, typer.Option(help="Tokens to generate for each.", min=2)] = 32,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests in flight; repeatable.", min=1)] = None,
    requests: Annotated[int, typer.Option(help="Requests of each load, at least its concurrency.", min=1)] = 16,
    trace: Annotated[Path | None, typer.Option(help="Replay a trace: Azure's CSV or Mooncake's JSONL.")] = None,
    trace_requests: Annotated[int, typer.Option(help="How many of the trace's requests.", min=1)] = 32,
    static: Annotated[bool, typer.Option("--static", help="Batch statically: the baseline.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="How keys and values are kept: auto, int8 or fp8.")] = "auto",
    native: Annotated[bool, typer.Option(help="Use Smelt's compiled CPU kernels, or torch's operators.")] = True,
    exact_inputs: Annotated[
        bool, typer.Option("--exact-inputs", help="Never round the inputs of weight-only formats to int8.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Measure how fast a checkpoint runs here, and how much of the machine that uses.

    Examples:

        smelt bench runs/quickstart/checkpoint

        smelt bench ./my-llama --prompt 512 --output 64 --concurrency 1 --concurrency 8 --json

        smelt bench ./my-llama --trace AzureLLMInferenceTrace_conv.csv
    """
    from ..runtime import Engine
    from ..runtime.bench import measure, table
    from ..runtime.workload import read_trace

    loads = concurrency or ([] if trace else [1, 4, 16])
    engine = Engine(
        _directory_of(checkpoint),
        max_sequences=max([32, *loads]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        native=native,
        exact_inputs=exact_inputs,
        static_batching=static,
        share_prefixes=False,
    )
    found = measure(
        engine,
        prompt=prompt,
        output=output,
        concurrencies=loads,
        requests=requests,
        trace=read_trace(trace, trace_requests, engine.max_length) if trace else None,
        told=Progress(True).say,
    )
    print(json.dumps({"checkpoint": checkpoint, **found.as_data()}, indent=2) if as_json else table(found))
    return 0


def _directory_of(name: str) -> Path:
    from .model_directory import find_model

    return find_model(name).path


@app.command()
@_told
def schema() -> int:
    """Print the JSON schema of recipes, for editors that complete and check YAML.

    Example:

        smelt schema > recipes/recipe.schema.json
    """
    from .recipe_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return 0


if __name__ == "__main__":
    main()
