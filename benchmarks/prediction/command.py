"""The command line of ``python -m benchmarks.kernel_code --step``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from ..common import save
from ..gpu.meta_model import FORMATS, changes_of
from ..gpu.random_checkpoints import LLAMA, QWEN, TINY
from .device import H100
from .step import CACHES, Asked, Prediction, Predictor
from .table import as_json, beside, headline, measured_rows, report
from .timing_model import Ideas

_ONE_BILLION = replace(
    LLAMA, name="Llama-3.2-1B", hidden=2048, wide=8192, layers=16, queries=32, shared=8, head=64, tied=True
)
# The one of a billion is what others have published most of.
MODELS = {"llama-3-8b": LLAMA, "qwen3-0.6b": QWEN, "llama-3.2-1b": _ONE_BILLION, "tiny": TINY}
_USUAL = list(FORMATS)[:4]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a prediction can be asked for."""
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3-8b"])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=_USUAL, help="of weights and head")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--context", nargs="+", type=int, default=[512])
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=["plain"])
    parser.add_argument(
        "--all", action="store_true", help="both models, batch 1, 8, 64, context 512 and 32768, all caches"
    )
    parser.add_argument(
        "--pdl",
        action=argparse.BooleanOptionalAction,
        help="assume programmatic dependent launch in every kernel, or in none; left out: where the code has it",
    )
    parser.add_argument("--prefetch", action="store_true", help="with --pdl: first bytes are asked for before the wait")
    parser.add_argument(
        "--norm-inside", action="store_true", help="assume that linears of at most 8 rows norm their inputs"
    )
    parser.add_argument(
        "--tile", nargs="+", default=[], metavar="KERNEL:NAME=NUMBER", help="linear_codes:outputs=32,warps=2"
    )
    parser.add_argument("--gap", type=float, default=H100.gap * 1e6, help="microseconds between kernels without PDL")
    parser.add_argument("--gap-pdl", type=float, default=H100.gap_dependent * 1e6, help="and with it")
    parser.add_argument(
        "--achieved", type=float, default=H100.achieved, help="share of the bandwidth that a copy reaches"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a measured profile of kernels, to stand beside")
    parser.add_argument(
        "--save-as",
        metavar="NAME",
        help="of the file in benchmarks/results, or a path without its .json; a run with --step alone is step_prediction",
    )


def run(given: argparse.Namespace) -> None:
    """Predict, print, save."""
    begun = time.monotonic()
    device = replace(H100, gap=given.gap / 1e6, gap_dependent=given.gap_pdl / 1e6, achieved=given.achieved)
    ideas = Ideas(given.pdl, given.prefetch, given.norm_inside)
    if given.prefetch and not given.pdl:
        sys.exit("--prefetch says what is done before a dependent launch's wait; give --pdl, too")
    try:
        changes = changes_of(given.tile)
    except ValueError as error:
        sys.exit(str(error))
    predictor = Predictor(device, ideas)
    found: list[Prediction] = []
    steps = _steps(given)
    for asked in steps:
        one = predictor.predict(asked, changes)
        if one.resident > device.memory:
            print(f"{headline(one).partition(':')[0]}: its {one.resident / 1e9:.0f} GB do not fit", flush=True)
            continue
        found.append(one)
        if given.compare is not None:
            try:
                print(beside(one, measured_rows(given.compare, one)))
            except (OSError, ValueError) as error:
                print(error, file=sys.stderr)
        else:
            print(report(one, device) if len(steps) <= len(_USUAL) else headline(one), flush=True)
    took = f"{len(predictor.known)} compilations, {time.monotonic() - begun:.0f} s, predicted and not measured"
    # What was asked for besides must not take the place of the whole.
    name = given.save_as or ("step_prediction" if sys.argv[1:] == ["--step"] else None)
    if name is None:
        print(f"\n{took}")
        return
    results = {
        "what": "predicted from machine code and published figures, not measured on a GPU",
        "device": asdict(device),
        "ideas": asdict(ideas),
        "tiles": changes,
        "steps": [as_json(one) for one in found],
    }
    path = save(name, "python -m benchmarks.kernel_code " + " ".join(sys.argv[1:]), results)
    print(f"\n{took}: {path}")


def _steps(given: argparse.Namespace) -> list[Asked]:
    models, batches, contexts, caches = given.model, given.batch, given.context, given.cache
    if given.all:
        models, batches, contexts, caches = list(MODELS)[:2], [1, 8, 64], [512, 32768], ["plain", "fp8", "int4"]
    return [
        Asked(MODELS[model], stored, batch, context, cache)
        for model in models
        for stored in given.format
        for batch in batches
        for context in contexts
        for cache in caches
    ]
