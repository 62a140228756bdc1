"""Speed of each format on this machine: models of a shape with random weights, built and timed here."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.directory.directory import ModelDirectory
from ...system.errors import RuntimeProblem
from ...system.hardware.machine import available_memory, human_bytes
from ...system.hardware.resources import free_disk
from ...system.interrupts import raise_lost_interrupt
from ...system.progress import Log
from ..costs.model_size import ModelSize
from ..engine.engine import Engine
from ..measure.bench import run_load
from ..measure.random_checkpoint import write_random_checkpoint
from ..requests.trace import Arrival
from .planner import MeasuredSpeed, ServingPlan

if TYPE_CHECKING:
    from .candidates import PlanCandidate

_PROMPT, _OUTPUT, _REPEATS = 256, 16, 5
# The largest format is in memory and on the disk at once, beside activations.
_MEMORY_SHARE, _DISK_SHARE = 0.4, 0.5


def measure_formats(found: ServingPlan, directory: ModelDirectory, *, log: Log = lambda _: None) -> ServingPlan:
    """The same plan, with the measured speed of each format of weights, unpruned and with a plain cache.

    If memory or disk do not allow all layers, two smaller depths are timed, and their difference stands for the others.
    Everything is written to a temporary directory, which is removed however this ends.

    Args:
        found: the plan.
        directory: of the model; only its ``config.json`` is read.
        log: gets messages for the user.

    Raises:
        SmeltError: not even a few layers fit.
    """
    if directory.config_data().get("quantization_config") is not None:
        raise RuntimeProblem(
            f"{directory.path}: is quantized, and --measure builds plain models; time the checkpoint itself with smelt bench"
        )
    prompt = max(1, min(_PROMPT, found.load.context - _OUTPUT, found.model.max_length - _OUTPUT))
    timed: dict[str, MeasuredSpeed] = {}
    candidates = [each.candidate for each in found.planned if not each.candidate.dropped]
    formats = {each.form: each for each in candidates if each.kv_cache_dtype == "auto"}
    with tempfile.TemporaryDirectory(prefix="smelt-plan-") as scratch:
        depths = _depths(found.model, Path(scratch))
        if depths[-1] < found.model.layers:
            log(f"only {depths[-1]} of {found.model.layers} layers fit here; the others' time is extrapolated")
        for i, (form, candidate) in enumerate(formats.items()):
            speeds = []
            for depth in depths:
                raise_lost_interrupt()
                log(f"timing {form} with {depth} layers ({i + 1} of {len(formats)} formats)")
                speeds.append(_timed(directory, candidate, depth, Path(scratch) / f"{i}-{depth}", prompt))
            timed[form] = _of_all(found.model.layers, depths, speeds, prompt)
    planned = []
    for each in found.planned:
        plain = each.candidate.kv_cache_dtype == "auto" and not each.candidate.dropped
        planned.append(replace(each, measured=timed[each.candidate.form]) if plain else each)
    same = {each.candidate.label: each for each in planned}
    recommended = found.recommended and same[found.recommended.candidate.label]
    return replace(found, planned=planned, recommended=recommended)


def _depths(size: ModelSize, scratch: Path) -> list[int]:
    """All layers if they fit, else two numbers of them."""
    itemsize = 2  # random checkpoints are in bfloat16
    fixed = itemsize * (size.head.numel + size.vocabulary * size.hidden)
    layer = itemsize * sum(each.numel for each in size.linears) / size.layers
    room = min(_MEMORY_SHARE * available_memory(), _DISK_SHARE * free_disk(scratch))
    most = min(size.layers, int((room - fixed) / layer))
    if most == size.layers:
        return [most]
    if most < 2:
        raise RuntimeProblem(
            f"--measure: two layers of {size.name} need {human_bytes(fixed + 2 * layer)}, and {human_bytes(room)} of memory and"
            f" disk can be used; free some (files go to {tempfile.gettempdir()}, or to TMPDIR)"
        )
    return [max(1, most // 2), most]


def _timed(
    directory: ModelDirectory, candidate: PlanCandidate, depth: int, folder: Path, prompt: int
) -> tuple[float, float]:
    """Seconds of a prompt and of a token after it: medians."""
    write_random_checkpoint(folder, _shorter(directory, depth).config(), candidate.scheme, candidate.head)
    engine = Engine(folder, max_model_len=prompt + _OUTPUT, max_num_seqs=1, quiet=True, enable_prefix_caching=False)
    load = [Arrival(0, prompt, _OUTPUT)]
    run_load(engine, "warm up", load, 1, seed=1)
    runs = [run_load(engine, "alone", load, 1, seed=100 + i) for i in range(_REPEATS)]
    firsts = statistics.median(each.first_token_p50 for each in runs)
    tokens = statistics.median(each.between_tokens_p50 or 0.0 for each in runs)
    engine.close()
    shutil.rmtree(folder, ignore_errors=True)
    return firsts, tokens


def _shorter(directory: ModelDirectory, depth: int) -> ModelDirectory:
    """The same model with its first layers alone."""
    config = directory.config()
    field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = config.num_hidden_layers
    if layers == depth:
        return directory
    data = config.to_dict()
    lists = {
        name: value[:depth]
        for name, value in data.items()
        if isinstance(value, list) and len(value) == layers and "token_id" not in name
    }
    return directory.changed({**lists, field: depth})


def _of_all(layers: int, depths: Sequence[int], speeds: Sequence[tuple[float, float]], prompt: int) -> MeasuredSpeed:
    """The speed of all layers: another layer takes what the layers between two depths took each."""
    (first, token), last = speeds[-1], depths[-1]
    if last < layers:
        more = (layers - last) / (last - depths[0])
        # Noise must not make layers free: none takes less than nothing.
        first += more * max(0.0, first - speeds[0][0])
        token += more * max(0.0, token - speeds[0][1])
    return MeasuredSpeed(prompt, prompt / first, 1 / token, last)
