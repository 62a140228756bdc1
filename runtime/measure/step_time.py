"""The time of a decode step on this machine, and of each of its linears, on the kernels that serve them.

The fastest of several rounds is used, to exclude other work on the machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor

from ...quant.grid import Grid
from ...quant.scheme import Scheme
from ...quant.stored.quantized_weight import QuantizedWeight
from ...system.progress import Log
from ..decoder.linears.linear import Linear
from ..engine.engine import Engine
from ..engine.setup.config import EngineConfig
from ..engine.setup.loading import operators_for
from ..requests.trace import Arrival
from ..weights.matrix import Matrix
from ..weights.stored import reader_of
from .bench import run_load

_CACHE_SIZES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 32 << 20
_ROUNDS = 15
_CALLS = 24
_SMALL_ROWS, _SMALL_COLUMNS = 32, 128
_PROMPT, _OUTPUT = 16, 48


def linear_seconds(
    rows: int, columns: int, schemes: Sequence[Scheme | None], dtype: torch.dtype, step: int
) -> list[float]:
    """Seconds of a linear for one row on this machine's CPU, by scheme.

    The schemes take turns, so that variations of the machine affect all alike. Each rotates through enough copies of the
    weight to match all bytes that a step would read, so that no more of them is cached than in a step, but at most
    four times the cache size. The time of a nearly empty call is subtracted.

    Args:
        rows, columns: of the weight.
        schemes: how it is stored; None for unquantized.
        dtype: the model's compute dtype.
        step: the number of weights that a step reads.
    """
    operators = operators_for(dtype, torch.device("cpu"), log=lambda _: None)
    all_of_step = -(-step // (rows * columns))
    timed: list[tuple[list[Linear], Tensor, float]] = []
    for scheme in schemes:
        matrix = _random_matrix(rows, columns, scheme, dtype)
        first = operators.linear(matrix, None)
        enough = -(-4 * _last_cache() // max(1, first.nbytes))
        copies = [first, *(operators.linear(matrix, None) for _ in range(min(all_of_step, enough) - 1))]
        small = (_SMALL_ROWS, max(_SMALL_COLUMNS, (scheme and scheme.args.group_size) or 0))
        nothing = [operators.linear(_random_matrix(*small, scheme, dtype), None)]
        little = torch.randn(1, small[1]).to(dtype)
        idle = min(_each(nothing, little) for _ in range(_ROUNDS))
        timed.append((copies, torch.randn(1, columns).to(dtype), idle))
    spent: list[list[float]] = [[] for _ in timed]
    for _ in range(_ROUNDS):
        for mine, (copies, x, idle) in zip(spent, timed, strict=True):
            mine.append(_each(copies, x) - idle)
    return [max(0.0, min(mine)) for mine in spent]


def step_seconds(checkpoint: str | Path, log: Log, *, trust_remote_code: bool = False) -> float:
    """Seconds between the tokens of a single request, on this machine's CPU.

    Args:
        checkpoint: a Hugging Face directory.
        log: gets messages for the user.
        trust_remote_code: run the checkpoint's Python code.

    Raises:
        RuntimeProblem: it cannot be served.
    """
    log("measuring the original's speed")
    config = EngineConfig(
        max_num_seqs=1, max_model_len=_PROMPT + _OUTPUT, trust_remote_code=trust_remote_code, quiet=True
    )
    engine = Engine(checkpoint, config)
    found = []
    for i in range(_ROUNDS + 1):
        load = run_load(engine, "alone", [Arrival(0, _PROMPT, _OUTPUT)], 1, seed=i)
        assert load.between_tokens_p50 is not None
        found.append(load.between_tokens_p50)
    return min(found[1:])


def _each(linears: list[Linear], x: Tensor) -> float:
    calls = max(_CALLS, len(linears))
    turns = itertools.islice(itertools.cycle(linears), calls)
    begun = time.perf_counter()
    for linear in turns:
        linear(x)
    return (time.perf_counter() - begun) / calls


def _random_matrix(rows: int, columns: int, scheme: Scheme | None, dtype: torch.dtype) -> Matrix:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).div_(columns**0.5).to(dtype)
    if scheme is None:
        return Matrix.plain(weight)
    grid = Grid.fit(weight, scheme.args)
    stored = QuantizedWeight(grid.round(weight.float()), grid).stored(scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme.config_group(["Linear"])}, format=scheme.format)
    data = config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    return reader_of(data, _Held(stored)).matrix("linear")


class _Held:
    """Tensors of one linear."""

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self._stored = {f"linear.{name}": tensor for name, tensor in stored.items()}

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> Tensor:
        return self._stored[name]


def _last_cache() -> int:
    """Bytes of the processor's largest cache; a typical size where the system does not report it."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = []
    for path in _CACHE_SIZES.glob("index*/size"):
        text = path.read_text().strip()
        if text[-1:] in units and text[:-1].isdigit():
            found.append(int(text[:-1]) * units[text[-1]])
    return max(found, default=_USUAL_CACHE)
