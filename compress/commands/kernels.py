"""``smelt kernels``: compile the GPU kernels without the GPU, and tune tiles on one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...system.errors import SmeltError
from .common.outcome import reporting_errors

if TYPE_CHECKING:
    from ...runtime.kernels.tools.tune import Tunable


app = typer.Typer(no_args_is_help=True, help="GPU kernels: compile them without the GPU, or tune them on it.")


@app.command()
@reporting_errors
def check(
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_90, sm_100 or gfx942; default all. Repeatable.")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel's name; default all. Repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Each kernel, format, tile and option once, not in all combinations.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> int:
    """Compile every shipped kernel, without a GPU, and read its machine code.

    Prints registers, spills, shared memory, occupancy, 16-byte loads and tensor-core instructions; fails if
    one spills, exceeds the shared memory, reads weights narrowly or multiplies without tensor cores.

    Examples:

        smelt kernels check

        smelt kernels check --target sm_90 --kernel linear_codes
    """
    return _check(target or [], kernel or [], quick, as_json)


@app.command()
@reporting_errors
def tune(
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="int2, int3, int4, int8, float4, float8, sparse4, bytes-int8, bytes-e4m3, bf16 or attention. Repeatable."
        ),
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of inputs; default 1 to 2048. Repeatable.", min=1)
    ] = None,
    minutes: Annotated[float, typer.Option(help="Start no shape after this many minutes.", min=0)] = 8,
    output: Annotated[Path | None, typer.Option(help="Output file, instead of this device's shipped file.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also tune finished shapes again.")] = False,
) -> int:
    """Time tiles on this machine's GPU, and keep the fastest in its device's file, replacing those in it.

    Examples:

        smelt kernels tune --form int4 --rows 1 --rows 16

        smelt kernels tune --form attention
    """
    return _tune(form or [], rows or [], minutes, output, again)


def _check(targets: Sequence[str], kernels: Sequence[str], quick: bool, as_json: bool) -> int:
    """Compile, print a table, and fail if a shipped kernel breaks a requirement.

    Raises:
        SmeltError: a name is unknown, or Triton is missing.
    """
    _needs_triton()
    from ...runtime.kernels.base.targets import TARGETS
    from ...runtime.kernels.tools.check import Compiled
    from ...runtime.kernels.tools.check import check as compile_all
    from ...runtime.kernels.tools.registry import KERNELS

    _known("target", targets, list(TARGETS))
    _known("kernel", kernels, [kernel.name for kernel in KERNELS])
    found: list[Compiled] = []
    for one in compile_all(targets or list(TARGETS), kernels, rare=not quick):
        found.append(one)
        if not as_json:
            if len(found) == 1 or found[-2].target != one.target:
                print(_HEAD.format(one.target))
            print(_line(one), flush=True)
    faulty = [one for one in found if one.faults]
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print(f"\n{len(found)} kernels compiled, {len(faulty)} with faults; none of this ran on a GPU")
    for one in faulty:
        print(f"smelt: {one.target}, {one.kernel}, {one.build}: {'; '.join(one.faults)}", file=sys.stderr)
    return 1 if faulty else 0


def _tune(forms: Sequence[str], rows: Sequence[int], minutes: float, output: Path | None, again: bool = False) -> int:
    """Time tiles on this machine's GPU and keep the fastest, after each round of a shape; finished shapes are skipped.

    Args:
        forms: of weights, or ``attention``; the usual ones if empty.
        rows: of inputs; all if empty.
        minutes: no shape is started after this time.
        output: the file to write, instead of this device's.
        again: tune finished shapes, too.

    Raises:
        SmeltError: a name is unknown, there is no GPU, or the output cannot be written.
    """
    _needs_triton()
    from ...runtime.kernels.linear.packing import FORMATS
    from ...runtime.kernels.tools import tune as tuning
    from ...runtime.kernels.tools.timing import device_lives
    from ...runtime.kernels.tools.tune_linears import BYTES, restoring_pays_from

    _known("format", forms, [*FORMATS, *BYTES, "bf16", "attention"])
    try:
        tuning.require_gpu()
        path = output or tuning.destination()
        done = set() if again else tuning.finished(path)
        work = [one for one in _to_be_tuned(forms, rows) if one.name not in done]
        if done and not work:
            print(f"{path}: all shapes are finished; --again tunes them again")
            return 0
        best: dict[str, tuning.Found] = {}
        for one in tuning.tune(work, 60 * minutes, print):
            best[one.of.name] = one
            tuning.write(list(best.values()), None, path)
        found = list(best.values())
        if found and device_lives():
            tuning.write(found, restoring_pays_from(found, print), path)
    except tuning.NotHere as error:
        raise SmeltError(str(error)) from None
    print(f"\n{path}: {len(found)} shapes" if found else "\nno shape finished in time")
    return 0 if found else 1


def _to_be_tuned(forms: Sequence[str], rows: Sequence[int]) -> list[Tunable]:
    """The most important first: few rows and single tokens, then prompts."""
    import torch

    from ...runtime.kernels.base.targets import target_of
    from ...runtime.kernels.tools.tune_attention import attention
    from ...runtime.kernels.tools.tune_linears import FORMS, ROWS, linears

    asked = [form for form in forms if form != "attention"] or ([] if forms else list(FORMS))
    products = linears(asked, rows=rows or ROWS)
    first = [one for one in products if one.stage == products[0].stage]
    if forms and "attention" not in forms:
        return [*products]
    target = target_of(torch.device("cuda"))
    single, prompts = (attention(target, prompts=several) for several in (False, True))
    return [*first, *single, *prompts, *products[len(first) :]]


_HEAD = (
    "\n{:<9}"
    + f"{'':60}{'registers':>10}{'spills':>8}{'shared':>8}{'occupancy':>11}{'16-byte loads':>15}{'tensor cores':>34}{'loop':>7}"
)


def _line(one: object) -> str:
    from ...runtime.kernels.tools.check import Compiled

    assert isinstance(one, Compiled)
    tensor_cores = f"{one.matrix} {'/'.join(one.kinds)}" if one.matrix else "none"
    marks = "  <- " + "; ".join(one.faults) if one.faults else ""
    return (
        f"{one.kernel:<14} {one.build:<54}{one.registers:>10}{one.spills:>8}{one.shared:>8}{one.occupancy:>11.0%}"
        f"{one.wide_loads:>15}{tensor_cores:>34}{one.loop or '-':>7}{marks}"
    )


def _known(what: str, given: Sequence[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise SmeltError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def _needs_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise SmeltError("the GPU kernels need triton, which is available only for Linux; pip install triton") from None
