"""The command line: ``smelt run``, ``eval``, ``sweep``, ``compare``, ``inspect``, ``export``, ``merge``, ``chat``, ``serve``, ``deploy``, ``bench``, ``simulate``, ``plan``,
``verify``, ``distill``, ``kernels`` and ``schema``.

Each command is a file in ``commands/`` and a row here.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ..system.processes.garbage import collect_old_seldom
from .commands import (
    bench,
    chat,
    compare,
    deploy,
    distill,
    eval,
    export,
    inspect,
    kernels,
    merge,
    plan,
    run,
    schema,
    serve,
    simulate,
    sweep,
    verify,
)
from .commands.common.outcome import say

app = typer.Typer(
    name="smelt",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Make language models smaller, and measure their accuracy and speed against the original.

    Try it (no network needed):

    - `smelt run recipes/quickstart.yaml` compresses a bundled model to 4 bits and reports accuracy and speed

    - `smelt run recipes/quickstart.yaml --dry-run` prints the memory, disk and time it needs, and what would fail

    - `smelt run recipes/quickstart.yaml --set model=./my-llama --output runs/mine` does it to your model

    - `smelt eval runs/quickstart --baseline builtin:smelt-6m` compares accuracy and speed

    - `smelt inspect runs/quickstart/checkpoint` shows what its bytes hold

    - `smelt verify runs/quickstart/checkpoint` measures again what its report claims

    - `smelt export runs/quickstart --to gptq --output runs/quickstart-gptq` writes it for other programs

    - `smelt merge runs/quickstart --adapter ./my-adapter --output runs/tuned` merges a LoRA adapter into its weights

    - `smelt chat runs/quickstart/checkpoint` starts a chat

    - `smelt serve runs/quickstart/checkpoint` serves it to clients of OpenAI's and Anthropic's APIs

    - `smelt deploy runs/quickstart/checkpoint --engine vllm` checks that another engine loads it, and prints what starts it there

    - `smelt bench runs/quickstart/checkpoint` measures its speed on this machine

    - `smelt simulate --trace trace.csv --model ./my-llama --device h100-sxm` predicts what a device would serve

    - `smelt plan ./my-llama --device h100-sxm --target tokens_per_second=200` finds the recipe that a device needs

    An interrupted run continues when the same command is given again.
    """,
)
for _name, _command in {
    "run": run.run,
    "eval": eval.eval_,
    "distill": distill.distill,
    "sweep": sweep.sweep,
    "compare": compare.compare,
    "inspect": inspect.inspect,
    "export": export.export,
    "merge": merge.merge,
    "chat": chat.chat,
    "serve": serve.serve,
    "deploy": deploy.deploy,
    "bench": bench.bench,
    "simulate": simulate.simulate,
    "plan": plan.plan,
    "schema": schema.schema,
    "verify": verify.verify,
}.items():
    app.command(_name)(_command)
app.add_typer(kernels.app, name="kernels")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"smelt {version('smelt')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What all commands take."""


def main() -> None:
    """Parse the command line and run the command."""
    collect_old_seldom()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has not all characters ends no command
            stream.reconfigure(errors="replace")
    for argument in sys.argv[1:]:
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in argument):
            shown = argument.encode(errors="replace").decode()
            sys.exit(say(f"{shown}: is not valid UTF-8; rename the file or directory", 2))
    app()


if __name__ == "__main__":
    main()
