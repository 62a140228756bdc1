"""The command line: ``smelt run``, ``eval``, ``sweep``, ``compare``, ``inspect``, ``export``, ``merge``, ``chat``, ``bench``, ``kernels`` and ``schema``."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from ..runtime import EngineConfig, SamplingParams
from ..runtime.cache_types import kv_dtype_help
from ..system.errors import SmeltError
from ..system.interrupts import SENTENCE, STATUS, remembered_interrupts
from ..system.progress import Progress

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

    - `smelt eval runs/quickstart --baseline builtin:smelt-6m` sets accuracy beside speed

    - `smelt inspect runs/quickstart/checkpoint` shows where the bytes are

    - `smelt export runs/quickstart --to gptq --output runs/quickstart-gptq` writes it for other programs

    - `smelt merge runs/quickstart --adapter ./my-adapter --output runs/tuned` puts a LoRA adapter into its weights

    - `smelt chat runs/quickstart/checkpoint` talks with it

    - `smelt bench runs/quickstart/checkpoint` measures how fast it runs here

    An interrupted run continues when the same command is given again.
    """,
)

P = ParamSpec("P")


def main() -> None:
    """Read the command line and do what it says."""
    for argument in sys.argv[1:]:
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in argument):
            shown = argument.encode(errors="replace").decode()
            sys.exit(_say(f"{shown}: is not a name in UTF-8; rename what it is the name of", 2))
    app()


def reporting_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn what can go wrong into one sentence on standard error and an exit status."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with remembered_interrupts():
                status = command(*args, **kwargs) or 0
        except SmeltError as error:
            status = _say(str(error), 1)
        except KeyboardInterrupt:
            status = _say(SENTENCE, STATUS)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
            advice = "the same command continues where this one stopped; --dry-run says what it needs"
            status = _say(f"out of memory; lower calibrate.samples or free some: {advice}", 1)
        raise typer.Exit(status)

    return guarded


def _say(text: str, status: int) -> int:
    # Only one of several processes says it, and only where they have met by now does torch know which.
    package = (__package__ or "").removesuffix(".compress")
    processes = sys.modules.get(f"{package}.system.processes")
    if processes is None or processes.first_to_fail():
        for line in text.split("\n"):
            print(f"smelt: {line}", file=sys.stderr)
    return status


@app.command()
@reporting_errors
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
    from .recipe.recipe import Recipe

    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    loaded = Recipe.load(recipe, overrides)
    if dry_run:
        return _print_plan(loaded, fresh, as_json)
    from ..system.processes import is_first
    from .pipeline.pipeline import run as run_recipe

    result = run_recipe(loaded, fresh=fresh)
    if not is_first():
        return 0
    if as_json:
        print(json.dumps({"checkpoint": str(result.checkpoint), "report": result.report.as_data()}, indent=2))
        return 0
    print(result.report.summary(colour=sys.stdout.isatty()))
    print(f"\ncheckpoint: {result.checkpoint}\nreport:     {result.checkpoint.parent / 'report.html'}")
    return 0


def _print_plan(recipe: Any, fresh: bool, as_json: bool) -> int:
    from ..system.processes import is_first
    from .pipeline.plan import Plan

    plan = Plan.make(recipe, fresh=fresh)
    if not is_first():
        return 1 if plan.problems else 0
    print(json.dumps(plan.as_data(), indent=2) if as_json else plan.terminal())
    return 1 if plan.problems else 0


@app.command(name="eval")
@reporting_errors
def eval_(
    checkpoints: Annotated[list[str], typer.Argument(help="Directories, hub names or builtin:smelt-6m.")],
    baseline: Annotated[
        str | None, typer.Option(help="What to compare with: a checkpoint, measured in turns, or a report.json.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks, comma-separated: names, or paths of YAML files.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most items of a task.", min=1)] = None,
    fewshot: Annotated[int | None, typer.Option(help="Examples in each prompt of a task.", min=0)] = None,
    text: Annotated[str, typer.Option(help="builtin, a .txt or .jsonl file, or a Hugging Face dataset.")] = "builtin",
    windows: Annotated[int, typer.Option(help="Most windows of the text.", min=1)] = 64,
    length: Annotated[
        int | None, typer.Option(help="Tokens a window; 256, or as many as the models have positions.", min=2)
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts whose continuations are shown.", min=0, max=1000)] = 4,
    speed: Annotated[
        str, typer.Option(metavar="KEY=VALUE,…", help="The load: prompt, generate, concurrency, repeats; or `none`.")
    ] = "prompt=128,generate=64,concurrency=1,8",
    device: Annotated[str, typer.Option(help="What computes: cpu, or cuda for a GPU.")] = "cpu",
    output: Annotated[Path, typer.Option(help="The directory for report.html, report.md and report.json.")] = Path(
        "runs/eval"
    ),
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    allow_foreign_baseline: Annotated[
        bool, typer.Option("--allow-foreign-baseline", help="Take a baseline's report from another machine.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with a checkpoint.")] = False,
    trust_task_code: Annotated[bool, typer.Option(help="Run Python that the YAML files of --tasks name.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False,
) -> int:
    """Measure checkpoints beside each other: accuracy, speed and memory, on the runtime that ships.

    Examples:

        smelt eval runs/quickstart/checkpoint --baseline builtin:smelt-6m

        smelt eval runs/w4 runs/w8 --baseline ./my-llama --tasks lambada_openai,piqa --limit 500

        smelt eval runs/w4 --baseline ./my-llama --speed none --fail-if "ppl>+2%"
    """
    from .evaluation.flags import evaluation_settings
    from .evaluation.gates import Gate

    gates = [Gate.parse(gate) for gate in fail_if or []]
    settings = evaluation_settings(
        tasks=tasks,
        speed=speed,
        limit=limit,
        fewshot=fewshot,
        text=text,
        windows=windows,
        **({} if length is None else {"length": length}),
        samples=samples,
        device=device,
        trust_task_code=trust_task_code,
    )
    from .evaluation.evaluate import evaluate

    report = evaluate(
        list(checkpoints),
        baseline=baseline,
        settings=settings,
        output=output,
        trust_remote_code=trust_remote_code,
        allow_foreign_baseline=allow_foreign_baseline,
        fresh=fresh,
    )
    if as_json:
        print(json.dumps(report.as_data(), indent=2))
    else:
        print(report.summary(colour=sys.stdout.isatty()))
        print(f"\nreport: {output / 'report.html'}")
    return _passed(report, gates)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmeltError(f"output: {path} cannot be made ({error.strerror}); choose another") from None


def _passed(report: Any, gates: list[Any]) -> int:
    """Say which gates fell, and by how much."""
    fallen = [sentence for gate in gates for sentence in gate.fallen(report)]
    for sentence in fallen:
        _say(sentence, 1)
    return 1 if fallen else 0


@app.command()
@reporting_errors
def sweep(
    file: Annotated[Path, typer.Argument(help="A recipe with a sweep section, such as recipes/sweep-quickstart.yaml.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of all trials. Repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the result goes, instead of the recipe's output.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the trials on a Ray cluster; `local` starts one here.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier sweep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Run a grid or list of recipes, and draw one Pareto front of all.

    Examples:

        smelt sweep recipes/sweep-quickstart.yaml

        smelt sweep my-sweep.yaml --ray auto
    """
    from .evaluation.gates import Gate
    from .sweep.trials import Sweep

    gates = [Gate.parse(gate) for gate in fail_if or []]
    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    loaded = Sweep.load(file, overrides)
    if gates and not loaded.base.evaluate:
        raise SmeltError(
            "--fail-if needs something measured, and the recipe says evaluate: false; leave one of them out"
        )
    from .sweep.run import run_sweep

    result = run_sweep(loaded, fresh=fresh, ray=ray)
    if as_json:
        made = {name: str(path) for name, path in result.checkpoints.items()}
        report = result.report.as_data() if result.report else None
        print(json.dumps({"checkpoints": made, "failed": result.failed, "report": report}, indent=2))
    else:
        for name, path in result.checkpoints.items():
            print(f"{name}: {path}")
        if result.report is not None:
            where = Path(loaded.base.output) / "report.html"
            print(f"\n{result.report.summary(colour=sys.stdout.isatty())}\n\nreport: {where}")
    for name, why in result.failed.items():
        _say(f"trial {name} failed: {why}", 1)
    passed = _passed(result.report, gates) if result.report is not None else 0
    return 1 if result.failed else passed


@app.command()
@reporting_errors
def compare(
    before: Annotated[Path, typer.Argument(help="A report.json, or the directory it is in.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    allow_foreign_baseline: Annotated[
        bool, typer.Option("--allow-foreign-baseline", help="Compare speeds of different machines.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="A directory to write the comparison's reports to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> int:
    """Compare two reports, model by model; nothing is measured.

    Models of the same name are compared, or, where each report has one model beside its baseline, those two.

    Example:

        smelt compare yesterday/report.json today/report.json --fail-if "decode_speedup<0.95"
    """
    from .evaluation.compare import compare as compared
    from .evaluation.gates import Gate
    from .reporting.report_files import load, save

    gates = [Gate.parse(gate) for gate in fail_if or []]
    pairs = compared(load(before), load(after), allow_foreign_baseline=allow_foreign_baseline)
    if as_json:
        print(json.dumps([report.as_data() for report in pairs], indent=2))
    else:
        print("\n\n".join(f"{report.title}\n{report.summary(colour=sys.stdout.isatty())}" for report in pairs))
    if output is not None:
        for report in pairs:
            inside = output if len(pairs) == 1 else output / report.candidates[0].name.replace("/", "_")
            _make_directory(inside)
            save(report, inside)
    return max(_passed(report, gates) for report in pairs)


@app.command()
@reporting_errors
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Show how a checkpoint's tensors are stored, and how much smaller it is than the original.

    Example:

        smelt inspect runs/quickstart/checkpoint
    """
    from ..models.directory.inspection import inspect as look
    from ..models.directory.inspection import terminal

    found = look(checkpoint)
    if as_json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        terminal(found)
    return 0


@app.command()
@reporting_errors
def export(
    checkpoint: Annotated[str, typer.Argument(help="A quantized checkpoint, or a run's output directory.")],
    to: Annotated[str, typer.Option(help="gptq, gptq-v2, awq, gguf, or dense for plain weights again.")],
    output: Annotated[Path, typer.Option(help="The new directory; for gguf the file.")],
    kind: Annotated[str | None, typer.Option("--type", help="Of gguf: its type, such as Q4_0.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace what an earlier export left there.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Write a quantized checkpoint in a format that other programs read; its codes stay what they are, bit for bit.

    Examples:

        smelt export runs/quickstart --to gptq --output runs/quickstart-gptq

        smelt export runs/quickstart --to gguf --type Q4_0 --output quickstart.gguf

        smelt export runs/quickstart --to dense --output runs/quickstart-dense
    """
    from .export import export as exported

    found = exported(checkpoint, to, output, kind=kind, fresh=fresh, trust_remote_code=trust_remote_code)
    print(json.dumps(found.as_data(), indent=2) if as_json else found.summary())
    return 0


@app.command()
@reporting_errors
def merge(
    checkpoint: Annotated[str, typer.Argument(help="A quantized checkpoint, or a run's output directory.")],
    adapter: Annotated[Path, typer.Option(help="The directory of a LoRA adapter that peft saved.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new directory.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace what an earlier merge left there.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Put a LoRA adapter into the compressed checkpoint that it was trained on; every layer keeps its number format.

    Codes are the nearest ones, and no text is needed. A recipe with `adapter:` rounds with calibration instead.

    Example:

        smelt merge runs/quickstart --adapter ./my-adapter --output runs/tuned
    """
    from .commands.merge import merge as merged

    found = merged(checkpoint, adapter, output, fresh=fresh, trust_remote_code=trust_remote_code)
    print(json.dumps(found.as_data(), indent=2) if as_json else found.summary())
    return 0


@app.command()
@reporting_errors
def chat(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample among the tokens that together have this probability.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.", min=1)] = 512,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    max_length: Annotated[int | None, typer.Option(help="The longest conversation, in tokens.", min=2)] = None,
    kv_dtype: Annotated[str, typer.Option(help=kv_dtype_help())] = "auto",
    native: Annotated[bool, typer.Option(help="Use Smelt's compiled CPU kernels, or torch's operators.")] = True,
    device: Annotated[str, typer.Option(help="cpu, or cuda, which has not been run on a GPU yet.")] = "cpu",
) -> int:
    """Talk with a checkpoint. /reset forgets the conversation, /quit leaves.

    Example:

        smelt chat runs/quickstart/checkpoint --temperature 0.8
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    config = EngineConfig(max_length=max_length, max_sequences=1, kv_dtype=kv_dtype, native=native, device=device)
    from ..runtime.engine.chat import Chat, converse
    from ..runtime.engine.engine import Engine

    engine = Engine(_directory_of(checkpoint), config)
    limit = min(max_tokens, max(1, engine.max_length // 2))
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is typed or piped may be in any encoding
        sys.stdin.reconfigure(errors="replace")
    converse(
        Chat(engine, replace(params, max_tokens=limit), system), input, lambda text: print(text, end="", flush=True)
    )
    return 0


@app.command()
@reporting_errors
def bench(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output: Annotated[int, typer.Option(help="Tokens to generate for each.", min=2)] = 32,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests in flight; repeatable.", min=1)] = None,
    requests: Annotated[
        int, typer.Option(help="Requests of each load, at least its concurrency.", min=1, max=10**6)
    ] = 16,
    trace: Annotated[Path | None, typer.Option(help="Replay a trace: Azure's CSV or Mooncake's JSONL.")] = None,
    trace_requests: Annotated[int, typer.Option(help="How many of the trace's requests.", min=1)] = 32,
    static: Annotated[bool, typer.Option("--static", help="Batch statically: the baseline.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help=kv_dtype_help())] = "auto",
    native: Annotated[bool, typer.Option(help="Use Smelt's compiled CPU kernels, or torch's operators.")] = True,
    exact_inputs: Annotated[
        bool, typer.Option("--exact-inputs", help="Never round the inputs of weight-only formats to int8.")
    ] = False,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Let a request's tokens depend on nothing beside it; see its price.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU with Triton kernels.")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Let torch.compile lower the layers, instead of Smelt's own kernels.")
    ] = False,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="What each fusion on a GPU buys: launches, bytes, and time where there is a GPU."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Measure how fast a checkpoint runs here, and how much of the machine that uses.

    Examples:

        smelt bench runs/quickstart/checkpoint

        smelt bench ./my-llama --prompt 512 --output 64 --concurrency 1 --concurrency 8 --json

        smelt bench ./my-llama --trace AzureLLMInferenceTrace_conv.csv

        smelt bench ./my-llama --compile

        smelt bench ./my-llama --ablate
    """
    loads = concurrency or ([] if trace else [1, 4, 16])
    config = EngineConfig(
        max_sequences=max([32, *loads]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        native=native,
        exact_inputs=exact_inputs,
        reproducible=reproducible,
        device=device,
        compile=compiled,
        static_batching=static,
        share_prefixes=False,
    )
    if ablate:
        return _ablate(checkpoint, prompt, output, dtype, kv_dtype, as_json)
    from ..runtime.engine.engine import Engine
    from ..runtime.measure.bench import measure, table
    from ..runtime.measure.workload import read_trace

    engine = Engine(_directory_of(checkpoint), config)
    found = measure(
        engine,
        prompt=prompt,
        output=output,
        concurrencies=loads,
        requests=requests,
        trace=read_trace(trace, trace_requests, engine.max_length) if trace else None,
        log=Progress(True).say,
    )
    print(json.dumps({"checkpoint": checkpoint, **found.as_data()}, indent=2) if as_json else table(found))
    return 0


def _ablate(checkpoint: str, prompt: int, output: int, dtype: str, kv_dtype: str, as_json: bool) -> int:
    from ..runtime.measure.ablation import ablate, table

    found = ablate(
        _directory_of(checkpoint), prompt=prompt, output=output, dtype=dtype, kv_dtype=kv_dtype, log=Progress(True).say
    )
    print(json.dumps({"checkpoint": checkpoint, **found.as_data()}, indent=2) if as_json else table(found))
    return 0


def _directory_of(name: str) -> Path:
    from ..models.directory.find import find_checkpoint

    return find_checkpoint(name).path


@app.command()
@reporting_errors
def schema(
    report: Annotated[bool, typer.Option("--report", help="The schema of report.json instead.")] = False,
) -> int:
    """Print the JSON schema of recipes, for editors that complete and check YAML; or that of reports.

    Examples:

        smelt schema > recipes/recipe.schema.json

        smelt schema --report > docs/report.schema.json
    """
    from .commands.schema import recipe_schema
    from .results.report import report_schema

    print(json.dumps(report_schema() if report else recipe_schema(), indent=2))
    return 0


kernels = typer.Typer(
    no_args_is_help=True, help="The GPU kernels: compile them for machines that are not here, or tune them."
)
app.add_typer(kernels, name="kernels")


@kernels.command()
@reporting_errors
def check(
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_90, sm_100 or gfx942; all if none. Repeatable.")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel's name; all if none. Repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Each kernel, format, tile and option once, not in all combinations.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> int:
    """Compile every shipped kernel, without a GPU, and read its machine code.

    Prints registers, spills, shared memory, occupancy, 16-byte loads and tensor-core instructions; fails if
    one spills, takes more shared memory than there is, reads weights narrowly or multiplies without tensor cores.

    Examples:

        smelt kernels check

        smelt kernels check --target sm_90 --kernel linear_codes
    """
    from .commands.kernels import check as check_kernels

    return check_kernels(target or [], kernel or [], quick, as_json)


@kernels.command()
@reporting_errors
def tune(
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="int2, int3, int4, int8, float4, float8, sparse4, bytes-int8, bytes-e4m3, bf16 or attention. Repeatable."
        ),
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of inputs; 1 to 2048 if none. Repeatable.", min=1)
    ] = None,
    minutes: Annotated[float, typer.Option(help="Begin no shape after so long.", min=0)] = 8,
    output: Annotated[Path | None, typer.Option(help="Where to, instead of this device's shipped file.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Begin shapes that are finished, too.")] = False,
) -> int:
    """Time tiles on this machine's GPU, and keep the fastest in its device's file, over those that it has.

    Examples:

        smelt kernels tune --form int4 --rows 1 --rows 16

        smelt kernels tune --form attention
    """
    from .commands.kernels import tune as tune_kernels

    return tune_kernels(form or [], rows or [], minutes, output, again)


if __name__ == "__main__":
    main()
