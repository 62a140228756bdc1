"""An ablation of the GPU fusions: launches, bytes and time of a step, with all of them and without each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...system.errors import RuntimeProblem
from ...system.progress import Log
from ..decoder.model import Model
from ..engine.engine import Engine
from ..engine.setup.config import EngineConfig
from ..engine.setup.loading import DTYPES
from ..fusions import Fusions
from ..gpu.operators import GpuOperators
from ..kernels.rows.sample_tokens import sample_tokens
from ..kernels.rows.sampling_state import choices
from ..requests.trace import Arrival
from ..weights.checkpoint import Checkpoint
from .bench import run_load
from .counting import StepCounts, count, count_decode, count_prompt

# With everything off it runs eagerly: only the linears' kernels are left.
EAGER = "everything"
_REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        without: the fusion that is switched off; empty for none.
        launches, moved: launches and bytes of a decode step of one sequence, including sampling.
        prompt_launches, prompt_moved: the same of a prefill step.
        decode_seconds, prompt_seconds: medians on the GPU; None without one.
    """

    without: str
    launches: int
    moved: int
    prompt_launches: int
    prompt_moved: int
    decode_seconds: float | None
    prompt_seconds: float | None


@dataclass(frozen=True)
class Ablation:
    """All combinations.

    Attributes:
        prompt: its tokens, and the context of the single token.
        layers: of the model.
        device: where times were measured; None if nothing was timed.
    """

    prompt: int
    layers: int
    device: str | None
    rows: list[Row]

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def ablate(
    checkpoint: Path,
    *,
    prompt: int,
    output: int,
    dtype: str,
    kv_cache_dtype: str,
    log: Log,
) -> Ablation:
    """Count a checkpoint's steps without each fusion, and time them if there is a GPU.

    Args:
        checkpoint: a directory.
        prompt: tokens of the prompt.
        output: tokens generated where a step is timed.
        dtype: compute dtype; float32 has no kernels for its linears.
        kv_cache_dtype: KV cache dtype where a step is timed.
        log: gets messages for the user.
    """
    timed = torch.cuda.is_available()
    rows, layers = [], 0
    for name in ("", *Fusions.names(), EAGER):
        log(f"without {name}" if name else "with everything")
        fusions = Fusions().without(*(Fusions.names() if name == EAGER else [name] if name else []))
        opened = Checkpoint(checkpoint)
        computing = opened.dtype if dtype == "auto" else DTYPES[dtype]
        model = Model(opened, GpuOperators(computing, torch.device("cpu"), fusions))
        layers = len(model.spec.layers)
        if prompt > model.spec.max_length:
            raise RuntimeProblem(f"prompt is {prompt}, more than the model's limit of {model.spec.max_length} tokens")
        decode, whole = count_decode(model, 1, prompt), count_prompt(model, prompt)
        _add_choice(decode, model, fusions)
        del model
        times = _times(checkpoint, fusions, prompt, output, dtype, kv_cache_dtype) if timed else (None, None)
        rows.append(Row(name, decode.launches, decode.moved, whole.launches, whole.moved, *times))
    return Ablation(prompt, layers, torch.cuda.get_device_name() if timed else None, rows)


def _add_choice(found: StepCounts, model: Model, fusions: Fusions) -> None:
    """Add what follows the layers: lm_head and sampling."""
    hidden = torch.zeros(1, model.spec.hidden, dtype=model.dtype)
    one = torch.zeros(1, dtype=torch.int32)
    of_slots = choices(1, 1, 16, torch.device("cpu"))

    def work() -> None:
        logits = model.head(hidden)
        if fusions.sampling:
            sample_tokens(logits, one, one, of_slots)
        else:
            logits.max(-1)
            logits.logsumexp(-1)

    more = count(work)
    found.launches += more.launches
    found.moved += more.moved
    found.kinds += more.kinds


def _times(
    checkpoint: Path, fusions: Fusions, prompt: int, output: int, dtype: str, kv_cache_dtype: str
) -> tuple[float, float]:
    config = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device="cuda",
        fusions=fusions,
        max_num_seqs=8,
        max_model_len=prompt + output + 1,
        max_num_batched_tokens=max(512, prompt),
        enable_prefix_caching=False,
        quiet=True,
    )
    engine = Engine(checkpoint, config)
    run_load(engine, "warm up", [Arrival(0, prompt, 8)], 1, seed=1)
    loads = [run_load(engine, "alone", [Arrival(0, prompt, output)], 1, seed=100 + i) for i in range(_REPEATS)]
    middle = _REPEATS // 2
    decode = sorted(load.between_tokens_p50 or 0.0 for load in loads)[middle]
    return decode, sorted(load.first_token_p50 for load in loads)[middle]


def table(found: Ablation) -> str:
    """A table for the terminal."""
    whole = found.rows[0]
    head = f"{'without':<12}{'one token: launches':>20}{'MB':>9}{'ms':>9}{f'prompt of {found.prompt}: launches':>28}{'MB':>9}{'ms':>9}"
    lines = [head]
    for row in found.rows:
        decode, first = (
            "-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in (row.decode_seconds, row.prompt_seconds)
        )
        lines.append(
            f"{row.without or 'nothing':<12}{_beside(row.launches, whole.launches):>20}{row.moved / 1e6:>9.1f}{decode:>9}"
            f"{_beside(row.prompt_launches, whole.prompt_launches):>28}{row.prompt_moved / 1e6:>9.1f}{first:>9}"
        )
    how = (
        f"times on {found.device}, medians of {_REPEATS}"
        if found.device
        else "no times, as there is no GPU; launches and bytes are counted from the launches themselves"
    )
    return "\n".join([*lines, "", f"{found.layers} layers; {how}"])


def _beside(count: int, whole: int) -> str:
    return str(count) if count == whole else f"{count} ({count - whole:+d})"
