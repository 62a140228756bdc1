"""This device's tiles: those of few rows and of single tokens first, written as they are found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial

from smelt.runtime.kernels.base.targets import target_of
from smelt.runtime.kernels.tools import tune, tune_linears
from smelt.runtime.kernels.tools.tune_attention import attention
from smelt.runtime.kernels.tools.tune_linears import FORMS, ROWS, linears, restoring_pays_from

from ..job import Job, Row
from ..place import Place

_MANY = 128  # rows of prompts


def jobs(place: Place) -> list[Job]:
    """A format at a number of rows, or attention; what is finished in the device's file is not begun again."""
    if place.rehearses:
        return [_job("int4, 1 rows", linears(("int4",), shapes=((128, 256),), rows=(1,)), 300)]
    target = target_of(place.device)
    few = [rows for rows in ROWS if rows < _MANY]
    single, prompts = (attention(target, prompts=several) for several in (False, True))
    found = [_job(f"{form}, {few[0]} rows", linears((form,), rows=few[:1]), 120) for form in FORMS]
    found.insert(3, _job("attention of single tokens", single, 120))
    found += [_job(f"{form}, {few[1]} rows", linears((form,), rows=few[1:2]), 90) for form in FORMS]
    found.append(_job("attention of prompts", prompts, 90))
    many = [rows for rows in ROWS if rows >= _MANY]
    found += [_job(f"{form}, many rows", linears((form,), rows=many), 120) for form in FORMS if form != "bf16"]
    found += [_job(f"{form}, {rows} rows", linears((form,), rows=(rows,)), 90) for rows in few[2:] for form in FORMS]
    return found[:1] if place.quick else found


def _job(name: str, work: Sequence[tune.Tunable], limit_s: float) -> Job:
    # A search ends by itself a little before the job is stopped.
    return Job(name, partial(_search, work, limit_s - 20), limit_s=limit_s)


def _search(work: Sequence[tune.Tunable], limit_s: float, place: Place) -> Iterator[Row]:
    if place.device.type == "cpu":
        # What asks a GPU; the search itself is tried.
        tune.precompile = lambda *_: None
        tune.seconds = place.seconds
        tune.device_lives = place.alive
        tune_linears.copies_needed = lambda *_: 1
        path = None
    else:
        path = tune.destination()
        done = tune.finished(path)
        work = [one for one in work if one.name not in done]
    best: dict[str, tune.Found] = {}
    for one in tune.search(work, place.device, limit_s, print):
        best[one.of.name] = one
        if path is not None:
            _keep(place, list(best.values()), None)
        if one.finished:
            yield {"shape": one.of.name, "tile": vars(one.tile), "microseconds": one.seconds * 1e6, "tried": one.tried}
    if path is not None and best and place.alive():
        pays = restoring_pays_from(list(best.values()), print)
        if pays is not None:
            _keep(place, list(best.values()), pays)
            yield {"restore_rows": pays}
    lacking = [one.name for one in work if one.name not in best or not best[one.name].finished]
    if lacking:
        raise TimeoutError(f"{len(lacking)} of {len(work)} shapes are not finished; run the stage again")


def _keep(place: Place, found: list[tune.Found], restore_rows: int | None) -> None:
    """In the checkout, where the next stage finds them, and beside the results, where a person does."""
    path = tune.write(found, restore_rows)
    if place.output is not None:
        shutil.copy(path, place.output / path.name)
