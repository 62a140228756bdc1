"""Part three: attention over long contexts and long prompts, beside the memory's rate and torch's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.attend_prompts import attend_prompts, work_of
from smelt.runtime.kernels.attend_rows import attend_rows, row_tile
from smelt.runtime.kernels.attend_tokens import attend_tokens
from smelt.runtime.kernels.cached import LayerCache, layer_cache
from smelt.runtime.kernels.flash import Runs
from smelt.runtime.kernels.targets import target_of
from smelt.runtime.kernels.tile import tiles_of
from smelt.runtime.kernels.timing import copy_rate, device_lives, seconds
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .common import one_line, options, save, told

LIMIT_S = 115  # of the ten minutes that all parts may take
LLAMA = Heads(32, 8, 128, 128**-0.5, None, None)
DTYPE = torch.bfloat16
# Sequences and their lengths; from 8 x 8k on all have the same number of positions.
SHAPES = ((8, 32768), (1, 131072), (8, 8192), (4, 16384), (2, 32768), (1, 65536))
KINDS = ("plain", "int8", "float8", "int4")
PROMPTS = (1024, 4096, 8192, 16384)
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        method: what it is.
        sequences, length: the shape.
        microseconds: the median; None if it was not measured.
        bandwidth: for single tokens, the share of the copy's rate at which the cache was read.
        tflops: for prompts, counting what a causal mask leaves.
        memory: for prompts, bytes that were needed besides inputs and outputs.
        why: for what was not measured.
    """

    method: str
    sequences: int
    length: int
    microseconds: float | None = None
    bandwidth: float | None = None
    tflops: float | None = None
    memory: int | None = None
    why: str = ""


def main() -> None:
    """Measure, print the table and the goals, save."""
    given = options(__doc__ or "")
    device, begun = torch.device("cuda"), time.monotonic()
    copied = copy_rate(device)
    todo: list[tuple[str, int, int, Callable[[], Row]]] = []
    for sequences, length in SHAPES[:1] if given.quick else SHAPES:
        todo.append(("paged", sequences, length, lambda n=sequences, s=length: _tokens("paged", n, s, copied)))
    for kind in KINDS[1:]:
        todo.append((kind, 8, 32768, lambda k=kind: _tokens(k, 8, 32768, copied, kind=k)))
    todo.append(("contiguous", 8, 32768, lambda: _tokens("contiguous", 8, 32768, copied, block=32768)))
    todo.append(("unsplit", 1, 65536, lambda: _tokens("unsplit", 1, 65536, copied, split=False)))
    for length in PROMPTS[:1] if given.quick else PROMPTS:
        for method in ("flash", "flat", *(f"torch {name}" for name in _BACKENDS), "unfused"):
            if method != "unfused" or length <= 4096:
                todo.append((method, 1, length, lambda m=method, s=length: _prompt(m, s)))
    rows: list[Row] = []
    reason = ""
    for method, sequences, length, measure in todo:
        if not reason and time.monotonic() - begun > LIMIT_S:
            reason = "out of time"
        try:
            rows.append(measure() if not reason else Row(method, sequences, length, why=reason))
        except Exception as error:
            rows.append(Row(method, sequences, length, why=one_line(error)))
        print(_line(rows[-1]), flush=True)
        if not reason and not device_lives():
            reason = "the device had stopped"
    goals = _goals(rows)
    told(goals)
    path = save(given, "attention", {"copy_bytes_per_s": copied, "rows": [asdict(r) for r in rows], "goals": goals})
    print(f"\n{time.monotonic() - begun:.0f} s: {path}")


def _tokens(
    method: str, sequences: int, length: int, copied: float, *, kind: str = "plain", block: int = 16, split: bool = True
) -> Row:
    """One new token for each sequence."""
    device = torch.device("cuda")
    cache, runs = _cached(sequences, length, kind, block)
    queries = torch.randn(sequences, LLAMA.queries * LLAMA.size, device=device, dtype=DTYPE)
    out = torch.empty_like(queries)
    target, tile = target_of(device), tiles_of(device).of_tokens(LLAMA, DTYPE, kind)
    if not split:
        target = replace(target, units=1)
    taken = seconds([lambda: attend_tokens(queries, LLAMA, cache, runs, out, target=target, tile=tile)] * 4)
    moved = sum(part.nbytes for part in cache.parts())
    return Row(method, sequences, length, taken * 1e6, bandwidth=moved / taken / copied)


def _cached(sequences: int, length: int, kind: str, block: int) -> tuple[LayerCache, Runs]:
    """A cache that just fits, its blocks all over the place."""
    device = torch.device("cuda")
    each = -(-length // block)
    cache = layer_cache(sequences * each, LLAMA.shared, block, LLAMA.size, kind, DTYPE, device)
    for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        if scales is None:
            codes.normal_()
        else:
            codes.view(torch.uint8).random_(0, 120)
            scales.uniform_(0.01, 0.02)
    tables = torch.randperm(sequences * each, device=device).int().view(sequences, each)
    rows = torch.arange(sequences, dtype=torch.int32, device=device)
    return cache, Runs(rows, torch.ones_like(rows), torch.full_like(rows, length), tables)


def _prompt(method: str, length: int) -> Row:
    """A whole prompt, causal."""
    device, size = torch.device("cuda"), LLAMA.size
    q = torch.randn(length, LLAMA.queries, size, device=device, dtype=DTYPE)
    if method in ("flash", "flat"):
        cache, runs = _cached(1, length, "plain", 16)
        runs = replace(runs, counts=runs.stops)
        tile = tiles_of(device).of_prompts(LLAMA, DTYPE, "plain")
        if method == "flat":
            tile = row_tile(target_of(device), LLAMA, DTYPE, "plain")
        work = torch.tensor(work_of([length], [length], tile.tokens(LLAMA.group)), dtype=torch.int32, device=device)
        queries, out = q.flatten(1), torch.empty_like(q.flatten(1))
        attend = attend_prompts if method == "flash" else attend_rows
        call = lambda: attend(queries, LLAMA, cache, runs, work, out, tile)  # noqa: E731
    else:
        k, v = (torch.randn(1, LLAMA.shared, length, size, device=device, dtype=DTYPE) for _ in range(2))
        asked = q.transpose(0, 1)[None]
        call = lambda: _unfused(asked, k, v)  # noqa: E731
        if method != "unfused":
            backend = _BACKENDS[method.removeprefix("torch ")]

            def call() -> Tensor:
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(asked, k, v, is_causal=True, enable_gqa=True)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_allocated() - before
    taken = seconds([call] * 2)
    done = 2 * 2 * LLAMA.queries * size * length * (length + 1) / 2
    return Row(method, 1, length, taken * 1e6, tflops=done / taken / 1e12, memory=needed)


def _unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.repeat_interleave(LLAMA.group, 1) for part in (k, v))
    scores = q @ k.transpose(2, 3) * LLAMA.scale
    scores += torch.full(scores.shape[2:], float("-inf"), device=q.device, dtype=q.dtype).triu(1)
    return scores.softmax(-1) @ v


def _goals(rows: list[Row]) -> list[dict[str, Any]]:
    """The goals for an H100."""
    taken = {(r.method, r.sequences, r.length): r.microseconds for r in rows if r.microseconds}
    share = {(r.method, r.sequences, r.length): r.bandwidth for r in rows}

    def ratio(one: tuple[str, int, int], other: tuple[str, int, int]) -> float | None:
        return taken[one] / taken[other] if one in taken and other in taken else None

    def beside_torch(length: int) -> float | None:
        best = min((taken[key] for key in taken if key[0].startswith("torch") and key[2] == length), default=None)
        mine = taken.get(("flash", 1, length))
        return best / mine if best and mine else None

    equal = [taken[("paged", *shape)] for shape in SHAPES[2:] if ("paged", *shape) in taken]
    long = ("paged", 8, 32768)
    return [
        {"goal": goal, "wanted": wanted, "reached": reached}
        for goal, wanted, reached in (
            ("8 x 32k: share of copy bandwidth", 0.85, share.get(long)),
            ("1 x 128k: share of copy bandwidth", 0.85, share.get(("paged", 1, 131072))),
            ("8 x 8k to 1 x 64k: slowest over fastest (at most)", 1.3, max(equal) / min(equal) if len(equal) == 4 else None),
            ("1 x 64k: times the unsplit kernel", 8.0, ratio(("unsplit", 1, 65536), ("paged", 1, 65536))),
            ("8 x 32k: paged over contiguous (at most)", 1.1, ratio(long, ("contiguous", 8, 32768))),
            ("8 x 32k: fp8 keys and values, times bf16", 1.7, ratio(long, ("float8", 8, 32768))),
            ("8 x 32k: int4 keys and values, times bf16", 2.5, ratio(long, ("int4", 8, 32768))),
            *((f"prompt of {n}: share of torch's best", 0.75, beside_torch(n)) for n in PROMPTS[1:]),
            ("prompt of 4096: times unfused", 2.0, ratio(("unfused", 1, 4096), ("flash", 1, 4096))),
        )
    ]  # fmt: skip


def _line(row: Row) -> str:
    shape = f"{row.sequences:>3} x {row.length:<8}{row.method:<18}"
    if row.microseconds is None:
        return f"{shape} not measured: {row.why}"
    rest = f"{row.bandwidth:>8.0%} of copy" if row.bandwidth is not None else f"{row.tflops:>8.0f} TFLOP/s"
    more = "" if row.memory is None else f"{row.memory / 1e6:>10.0f} MB"
    return f"{shape}{row.microseconds:>12.1f} us{rest}{more}"


if __name__ == "__main__":
    main()
