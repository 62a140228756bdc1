"""``smelt eval``: accuracy and speed of checkpoints, and of models behind servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...system.errors import SmeltError
from .common.outcome import not_certified, passed, reporting_errors


@reporting_errors
def eval_(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(help="Directories, hub names or builtin:smelt-6m. May be left out with --server."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Baseline: a checkpoint, measured in turns with the others, or a report.json.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks, comma-separated: names, or paths of YAML files.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum items per task.", min=1)] = None,
    fewshot: Annotated[int | None, typer.Option(help="Few-shot examples per prompt.", min=0)] = None,
    text: Annotated[str, typer.Option(help="builtin, a .txt or .jsonl file, or a Hugging Face dataset.")] = "builtin",
    windows: Annotated[int, typer.Option(help="Maximum windows of the text.", min=1)] = 64,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per window; 256 by default, or the models' context length if shorter.", min=2),
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of sample continuations to show.", min=0, max=1000)] = 4,
    speed: Annotated[
        str,
        typer.Option(metavar="KEY=VALUE,…", help="Load to time: prompt, generate, concurrency, repeats; or `none`."),
    ] = "prompt=128,generate=64,concurrency=1,8",
    device: Annotated[str, typer.Option(help="Device: cpu, or cuda for a GPU.")] = "cpu",
    tp: Annotated[int, typer.Option(help="Processes that divide each layer between them.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Processes that have some of the layers each.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="Directory for report.html, report.md and report.json.")] = Path(
        "runs/eval"
    ),
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    guarantee: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM", help="E.g. `acc loss <= 1% @95%`, `ppl loss <= 2%` or `kl <= 0.02`. Repeatable."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTER",
            help="Measure each load with drafts, too: lookup, nested, early-exit:N, or a checkpoint, which drafts for the baseline; lookup+ before one of these joins both.",
        ),
    ] = None,
    allow_foreign_baseline: Annotated[
        bool, typer.Option("--allow-foreign-baseline", help="Accept a baseline report from another machine.")
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A server with OpenAI's API, such as http://localhost:8000. Repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which of a server's models, if it serves several.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The checkpoint that a server serves, for its tokenizer, if the server does not say which."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The servers' key.", envvar="SMELT_API_KEY", show_envvar=True)
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with a checkpoint.")] = False,
    trust_task_code: Annotated[
        bool,
        typer.Option(
            help="Run Python code named by the YAML files of --tasks, and what models write where a task asks for that."
        ),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore earlier measurements and measure again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False,
) -> int:
    """Measure and compare checkpoints: accuracy, speed and memory, on Smelt's runtime; and models behind servers.

    Examples:

        smelt eval runs/quickstart/checkpoint --baseline builtin:smelt-6m

        smelt eval runs/w4 runs/w8 --baseline ./my-llama --tasks lambada_openai,piqa --limit 500

        smelt eval runs/w4 --baseline ./my-llama --speed none --fail-if "ppl>+2%"

        smelt eval runs/w4 --baseline ./my-llama --tasks piqa --guarantee "acc loss <= 1% @95%"

        smelt eval runs/w4 --baseline ./my-llama --drafter runs/w4

        smelt eval --server http://localhost:8000 --baseline ./my-llama --tokenizer ./my-llama
    """
    from ..evaluation.flags import evaluation_settings
    from ..evaluation.gates import Gate, raise_unmeasured
    from ..evaluation.guarantee import Guarantee

    gates = [Gate.parse(gate) for gate in fail_if or []]
    claims = [Guarantee.parse(claim).text for claim in guarantee or []]
    if claims and baseline is None:
        raise SmeltError("--guarantee is about a loss beside a baseline; give it with --baseline")
    settings = evaluation_settings(
        tasks=tasks,
        speed=speed,
        limit=limit,
        fewshot=fewshot,
        text=text,
        windows=windows,
        **({} if length is None else {"length": length}),
        samples=samples,
        guarantee=claims,
        drafter=drafter,
        device=device,
        tp=tp,
        pp=pp,
        trust_task_code=trust_task_code,
    )
    raise_unmeasured(gates, settings, baseline=baseline is not None)
    if not server and (model is not None or tokenizer is not None):
        raise SmeltError("--model and --tokenizer are of a server; give it with --server, or leave them out")
    from ..evaluation.evaluate import evaluate
    from ..evaluation.scoring.on_server import RemoteModel

    servers = [
        RemoteModel(url, model, tokenizer=tokenizer, api_key=api_key, trust_remote_code=trust_remote_code)
        for url in server or []
    ]
    report = evaluate(
        list(checkpoints or []),
        baseline=baseline,
        servers=servers,
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
    return max(passed(report, gates), not_certified(report, claims))
