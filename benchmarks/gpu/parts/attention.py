"""Attention over long contexts and long prompts, beside the copy's rate and torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from smelt.runtime.cache_types import SELECTABLE_KINDS
from smelt.runtime.heads import Heads
from smelt.runtime.kernels.attention.attend_prompts import attend_prompts, work_of
from smelt.runtime.kernels.attention.attend_rows import attend_rows, row_tile
from smelt.runtime.kernels.attention.attend_tokens import attend_tokens
from smelt.runtime.kernels.attention.flash import Runs
from smelt.runtime.kernels.base.launch import overlapping_at
from smelt.runtime.kernels.base.targets import target_of
from smelt.runtime.kernels.rows.cached import LayerCache, layer_cache
from smelt.runtime.kernels.tiles.tile import tiles_of
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..job import Job, Row
from ..place import Place
from ..worker import one_line

LLAMA = Heads(32, 8, 128, 128**-0.5, None, None)
DTYPE = torch.bfloat16
# Sequences and their lengths; from 8 x 8k on all have the same number of positions. Short ones are what a batch of one is.
SHAPES = ((8, 32768), (1, 131072), (1, 512), (8, 8192), (4, 16384), (2, 32768), (1, 65536), (1, 2048), (64, 1024))
KINDS = tuple(kind for kind in SELECTABLE_KINDS if kind != "plain")
PROMPTS = (4096, 8192, 1024, 16384)
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_REHEARSED = 48


def jobs(place: Place) -> list[Job]:
    """Single tokens, then prompts."""
    if place.rehearses:
        shapes, long, prompts = ((2, _REHEARSED),), (2, _REHEARSED), (_REHEARSED,)
    elif place.quick:
        shapes, long, prompts = SHAPES[:1], SHAPES[0], PROMPTS[:1]
    else:
        shapes, long, prompts = SHAPES, SHAPES[0], PROMPTS
    found = [_job("paged", *shape) for shape in shapes]
    found += [_job(kind, *long, kind=kind) for kind in KINDS]
    found.append(_job("contiguous", *long, block=long[1]))
    found.append(_job("unsplit", 1, 65536 if shapes == SHAPES else long[1], split=False))
    for length in prompts:
        methods = ["flash", *(f"torch {name}" for name in _BACKENDS), "flat"]
        if length <= 4096:
            methods.append("unfused")
        found += [
            Job(
                f"{method}, prompt of {length}",
                partial(_prompt, method, length),
                {"method": method, "sequences": 1, "length": length} | _tile_of(place, "prompts", method),
                limit_s=40,
            )
            for method in methods
            if not (place.rehearses and method.startswith("torch"))
        ]
    return [replace(job, about=job.about | _tile_of(place, "tokens", job.about["method"])) for job in found]


def _job(method: str, sequences: int, length: int, *, kind: str = "plain", block: int = 16, split: bool = True) -> Job:
    measure = partial(_tokens, sequences, length, kind, block, split)
    about = {"method": method, "sequences": sequences, "length": length}
    return Job(f"{method}, {sequences} x {length}", measure, about, limit_s=40)


def _tile_of(place: Place, which: str, method: str) -> dict[str, object]:
    """The tile that a method of ours has: others are not measured again when tiles change."""
    tiles, kind = tiles_of(place.device), method if method in KINDS else "plain"
    if which == "tokens" and method in ("paged", "contiguous", "unsplit", *KINDS):
        return {"tile": vars(tiles.of_tokens(LLAMA, DTYPE, kind))}
    if which == "prompts" and method == "flash":
        return {"tile": vars(tiles.of_prompts(LLAMA, DTYPE, "plain"))}
    return {}


def _tokens(sequences: int, length: int, kind: str, block: int, split: bool, place: Place) -> Iterator[Row]:
    """One new token for each sequence."""
    device = place.device
    cache, runs = _cached(sequences, length, kind, block, device)
    queries = torch.randn(sequences, LLAMA.queries * LLAMA.size, device=device, dtype=DTYPE)
    out = torch.empty_like(queries)
    target, tile = target_of(device), tiles_of(device).of_tokens(LLAMA, DTYPE, kind)
    if not split:
        target = replace(target, units=1)
    # A short cache would stay in the second level; as many others as it takes until it is gone.
    each = sum(part.nbytes for part in cache.parts())
    caches = [cache, *(cache.copied() for _ in range(0 if each >= 1 << 28 else place.copies(each) - 1))]
    with overlapping_at(sequences):
        taken = place.seconds(
            [lambda c=c: attend_tokens(queries, LLAMA, c, runs, out, target=target, tile=tile) for c in caches]
        )
    yield {"microseconds": taken * 1e6, "bytes": each}


def _cached(sequences: int, length: int, kind: str, block: int, device: torch.device) -> tuple[LayerCache, Runs]:
    """A cache that just fits, its blocks all over the place."""
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


def _prompt(method: str, length: int, place: Place) -> Iterator[Row]:
    """A whole prompt, causal; ``memory`` is what was needed besides inputs and outputs."""
    device, size = place.device, LLAMA.size
    q = torch.randn(length, LLAMA.queries, size, device=device, dtype=DTYPE)
    if method in ("flash", "flat"):
        cache, runs = _cached(1, length, "plain", 16, device)
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

    try:
        call()
        place.wait()
    except RuntimeError as error:
        if not method.startswith("torch") or not place.alive():
            raise
        yield {"not_measured": one_line(error)}  # a backend does not take every shape
        return
    needed = 0
    if not place.rehearses:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        needed = torch.cuda.max_memory_allocated() - before
    with overlapping_at(length):
        taken = place.seconds([call] * 2)
    # Of the scores a causal mask leaves about half.
    yield {
        "microseconds": taken * 1e6,
        "operations": 2 * 2 * LLAMA.queries * size * length * (length + 1) / 2,
        "memory": needed,
    }


def _unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.repeat_interleave(LLAMA.group, 1) for part in (k, v))
    scores = q @ k.transpose(2, 3) * LLAMA.scale
    scores += torch.full(scores.shape[2:], float("-inf"), device=q.device, dtype=q.dtype).triu(1)
    return scores.softmax(-1) @ v
