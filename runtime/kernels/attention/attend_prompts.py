"""Flash attention of runs of tokens to their sequences' cached positions; scores are never written to memory.

A program has a tile of queries, with the heads of a group that share a key together, and loops over the
positions that they attend to. Where the following linear reads 8-bit inputs, the last program of a tile's
tokens rounds them, which saves a launch.
"""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache_types import BY_KIND, QUANTIZED_KINDS
from ...heads import Heads
from ..base.kernel import Build, Case, Kernel, PreparedCase
from ..base.launch import Launch, interpreted, takes_ptx
from ..base.overlap import wait_and_launch
from ..base.targets import Target, splitting, target_of
from ..base.workspace import Workspace, workspace
from ..rows.cached import LayerCache
from ..rows.quantize_rows import CODES, LARGEST, NAMES, TARGETS_OF, code_room, larger, quantize_rows, rounded, scale_of
from ..tiles.attention_tiles import PromptTile, prompt_tile
from .case import AttentionCase, attention_cases
from .flash import CHANGING, Runs, dot_types, over_positions

_ROUNDED_BLOCK = 128  # columns that share a scale
_ROUNDED = 16384  # elements that a program rounds at once


@triton.jit
def tile_of_queries(
    queries,
    work,
    item,
    rows,
    counts,
    stops,
    head,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """A tile of queries, their positions, where their outputs go and which of them there are.

    Returns:
        Also the sequence, how many positions it has, and the first and last positions among the queries'.
    """
    sequence = tl.load(work + 2 * item)
    begin = tl.load(work + 2 * item + 1)
    count = tl.load(counts + sequence)
    stop = tl.load(stops + sequence)
    row = tl.arange(0, BM)
    TOKENS: tl.constexpr = BM // GROUP
    token = begin + row // GROUP
    valid = (token < count) & (row < TOKENS * GROUP)
    before = stop - count
    position = before + token
    column = tl.arange(0, DP)
    at = (tl.load(rows + sequence) + token).to(tl.int64) * (QUERIES * D) + (head * GROUP + row % GROUP) * D
    to = at[:, None] + column[None, :]
    inside = valid[:, None] & (column < D)[None, :]
    query = tl.load(queries + to, mask=inside, other=0.0).to(DOT)
    last = before + tl.minimum(begin + TOKENS, count)
    return query, position, to, inside, sequence, stop, before + begin, last


@triton.jit
def _round_tokens(
    out,
    codes,
    scales,
    first,
    count,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFT: tl.constexpr,
):
    """What :func:`quantize_rows` does, for a tile's tokens."""
    token = tl.arange(0, TOKENS)
    valid = token < count
    row = (first + token).to(tl.int64)
    column = tl.arange(0, STEP)
    at = row[:, None] * WIDTH + column[None, :]
    if BY_BLOCK:
        for start in range(0, WIDTH, STEP):
            inside = valid[:, None] & (start + column < WIDTH)[None, :]
            values = tl.load(out + at + start, mask=inside, other=0.0).to(tl.float32)
            scale = scale_of(tl.abs(values), 1, LIMIT)
            tl.store(codes + at + start, rounded(values, scale[:, None], CODE, LIMIT, SOFT), mask=inside)
            tl.store(scales + row * ((WIDTH + STEP - 1) // STEP) + start // STEP, scale, mask=valid)
    else:
        largest = tl.zeros([TOKENS, STEP], tl.float32)
        for start in range(0, WIDTH, STEP):
            inside = valid[:, None] & (start + column < WIDTH)[None, :]
            largest = larger(largest, tl.load(out + at + start, mask=inside, other=0.0).to(tl.float32))
        scale = scale_of(largest, 1, LIMIT)
        tl.store(scales + row, scale, mask=valid)
        for start in range(0, WIDTH, STEP):
            inside = valid[:, None] & (start + column < WIDTH)[None, :]
            values = tl.load(out + at + start, mask=inside, other=0.0).to(tl.float32)
            tl.store(codes + at + start, rounded(values, scale[:, None], CODE, LIMIT, SOFT), mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def _attend_prompts(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    rows,
    counts,
    stops,
    tables,
    work,
    out,
    codes,
    code_scales,
    arrived,
    tables_stride,
    QUERIES: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFT: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    head = tl.program_id(0)
    item = tl.program_id(1)
    if tl.load(work + 2 * item) >= 0:
        query, position, to, inside, sequence, stop, begin, last = tile_of_queries(
            queries, work, item, rows, counts, stops, head, QUERIES, GROUP, D, DP, DOT, BM
        )
        table = tables + sequence.to(tl.int64) * tables_stride
        acc = tl.zeros([BM, DP], tl.float32)
        highest = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        # All queries see all positions up to the first query's own, and of a window those from the last query's first on;
        # only tiles beyond that need a mask.
        first = 0
        whole = (begin + 1) // BN * BN
        if WINDOW > 0:
            first = tl.maximum(begin - WINDOW + 1, 0) // BN * BN
            inner = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW, 0), BN) * BN, last)
            whole = tl.maximum(whole, inner)
            acc, highest, total = over_positions(
                query, position, acc, highest, total, first, inner, stop, table, head, keys, values, key_scales,
                value_scales, True, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
            )  # fmt: skip
            first = inner
        acc, highest, total = over_positions(
            query, position, acc, highest, total, first, whole, stop, table, head, keys, values, key_scales,
            value_scales, False, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
        )  # fmt: skip
        acc, highest, total = over_positions(
            query, position, acc, highest, total, whole, last, stop, table, head, keys, values, key_scales,
            value_scales, True, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
        )  # fmt: skip
        tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        if codes is not None:
            tl.debug_barrier()
            if tl.atomic_add(arrived + item, 1, sem="acq_rel") == SHARED - 1:
                tl.store(arrived + item, 0)
                token = tl.load(work + 2 * item + 1)
                count = tl.minimum(tl.load(counts + sequence) - token, BM // GROUP)
                _round_tokens(
                    out, codes, code_scales, tl.load(rows + sequence) + token, count, TOKENS, QUERIES * D, STEP,
                    BY_BLOCK, CODE, LIMIT, SOFT,
                )  # fmt: skip


def launch(
    queries: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    work: Tensor,
    out: Tensor,
    tile: PromptTile,
    space: Workspace,
    rounded_to: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """One step's, ready to run."""
    if not queries.is_contiguous():
        raise ValueError("queries must be contiguous")
    codes, scales = rounded_to or (None, None)
    by_block = scales is not None and scales.dim() == 2
    tokens = triton.next_power_of_2(tile.tokens(heads.group))
    arguments: dict[str, Tensor | int | None] = {
        "queries": queries,
        "work": work,
        "out": out,
        "codes": codes,
        "code_scales": scales,
        "arrived": None if codes is None else space.reserve(1, work.shape[0])[1],
        **cache.arguments(),
        **runs.arguments(),
    }
    return Launch(
        _attend_prompts,
        arguments,
        {
            **attention_constants(queries.dtype, heads, cache),
            "BM": tile.queries,
            "BN": tile.positions,
            "STAGES": tile.stages,
            "CODE": tl.int8 if codes is None else CODES[codes.dtype],
            "BY_BLOCK": by_block,
            "LIMIT": 0.0 if codes is None else LARGEST[codes.dtype],
            "SOFT": interpreted(),
            "TOKENS": tokens,
            "STEP": _ROUNDED_BLOCK if by_block else max(_ROUNDED_BLOCK, _ROUNDED // tokens),
        },
        (heads.shared, work.shape[0]),
        tile.warps,
        tile.stages,
    )


def attention_constants(dtype: torch.dtype, heads: Heads, cache: LayerCache) -> dict[str, object]:
    """The constants of a layer for all attention kernels.

    Raises:
        ValueError: the score scale is not positive, or the cache has too many rows for 32-bit indices.
    """
    if heads.scale <= 0:
        # The highest score is found before scaling.
        raise ValueError(f"attention needs a positive score scale, not {heads.scale}")
    if cache.keys[..., 0].numel() >= 1 << 31:
        raise ValueError("a layer's cache has more than 2 billion rows")
    return {
        "QUERIES": heads.queries,
        "GROUP": heads.group,
        **cache.constants(),
        **dot_types(dtype, cache.kind),
        "ASM": takes_ptx(cache.keys.device),
        "SCALE": heads.scale,
        "CAP": heads.cap or 0.0,
        "WINDOW": heads.window or 0,
    }


def work_of(counts: list[int], stops: list[int], tokens: int) -> list[tuple[int, int]]:
    """The tiles of some runs, as pairs of a run and its first token; those with the most positions come first.

    Args:
        counts: tokens of each run; runs of 1 or none have no tile.
        stops: positions of each sequence.
        tokens: of a tile.
    """
    tiles = [
        (stop - count + begin, i, begin)
        for i, (count, stop) in enumerate(zip(counts, stops, strict=True))
        if count > 1
        for begin in range(0, count, tokens)
    ]
    return [(i, begin) for _, i, begin in sorted(tiles, reverse=True)]


def attend_prompts(
    queries: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    work: Tensor,
    out: Tensor,
    tile: PromptTile | None = None,
    rounded_to: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of some runs' tokens to their sequences' cached positions, including their own.

    Args:
        queries: ``[tokens, query heads x size]``.
        heads: the layer's.
        cache: the layer's; the runs' own keys and values are in it.
        runs: all of the step's.
        work: int32 ``[tiles, 2]`` of :func:`work_of`; -1 for no tile.
        out: ``[tokens, query heads x size]``, of which the runs' rows are written.
        tile: the tile of queries and positions; by default the device's.
        rounded_to: codes and scales as :func:`quantize_rows` makes them of ``out``, whose rows are written, too; only where
            programs see each other's stores.
    """
    tile = tile or prompt_tile(target_of(queries.device), heads, queries.dtype, cache.kind)
    if work.shape[0]:
        launch(queries, heads, cache, runs, work, out, tile, workspace(queries.device), rounded_to).run()
    return out


def _case(case: AttentionCase, tile: PromptTile) -> AttentionCase:
    def compute(queries: Tensor, cache: LayerCache, runs: Runs, out: Tensor) -> None:
        counts, stops = runs.counts.tolist(), runs.stops.tolist()
        work = torch.tensor([*work_of(counts, stops, tile.tokens(case.heads.group)), (-1, 0)], dtype=torch.int32)
        attend_prompts(queries, case.heads, cache, runs, work.to(queries.device), out, tile)

    return case.computed_by(compute)


def _rounded_case(case: AttentionCase, code: torch.dtype, by_block: bool) -> Case:
    """Codes and scales must be bitwise those of a separate rounding launch on the outputs."""

    def prepare(device: torch.device, draw: torch.Generator) -> PreparedCase:
        def compute(queries: Tensor, cache: LayerCache, runs: Runs, out: Tensor) -> None:
            tile = PromptTile(16, 16, 4, 1)
            work = work_of(runs.counts.tolist(), runs.stops.tolist(), tile.tokens(case.heads.group))
            to = code_room(out, code, by_block=by_block)
            to[0].view(torch.uint8).fill_(77)
            to[1].fill_(float("nan"))
            items = torch.tensor(work, dtype=torch.int32, device=device)
            attend_prompts(queries, case.heads, cache, runs, items, out, tile, to)
            expected = quantize_rows(out, code, by_block=by_block)
            same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(to, expected, strict=True)]
            if not all(same):
                out.fill_(float("nan"))

        return case.computed_by(compute).trial(device, draw)

    name = f"{case.name}, then {NAMES[code]} {'by block' if by_block else 'by row'}"
    targets = splitting(TARGETS_OF[code])
    return Case(name, prepare, case.case().tolerance, targets=targets)


def _build(
    heads: Heads,
    kind: str,
    dtype: torch.dtype,
    block: int,
    *,
    code: torch.dtype | None = None,
    by_block: bool = False,
    rare: bool = False,
) -> Build:
    note = "" if code is None else f", then {NAMES[code]}{' by block' * by_block}"
    case = AttentionCase(heads, kind, dtype, block, ((512, 512),), note)

    def on_meta(target: Target) -> Launch:
        meta = torch.device("meta")
        queries, cache, runs, out = case.on_meta()
        work = torch.empty(64, 2, dtype=torch.int32, device=meta)
        to = None
        if code is not None:
            shape = (512, -(-out.shape[1] // _ROUNDED_BLOCK)) if by_block else (512,)
            to = (torch.empty(out.shape, dtype=code, device=meta), torch.empty(shape, device=meta))
        tile = prompt_tile(target, heads, dtype, kind)
        return launch(queries, heads, cache, runs, work, out, tile, Workspace(meta), to)

    halves = dtype != torch.float32
    targets = case.targets if code is None else splitting(TARGETS_OF[code])
    return Build(
        case.name,
        on_meta,
        matrix=halves,
        streamed=("keys",) if halves and kind == "plain" else (),
        wide=False,
        targets=targets,
        rare=rare,
        overlapped=halves,
    )


def _builds() -> list[Build]:
    def heads(size: int, **changes: object) -> Heads:
        return Heads(32, 8, size, size**-0.5, **{"window": None, "cap": None, **changes})  # pyright: ignore[reportArgumentType]

    half = torch.bfloat16
    found = [_build(heads(size), "plain", half, 16, rare=size != 128) for size in (64, 80, 96, 128, 256)]
    found += [_build(heads(128), kind, half, 16, rare=not BY_KIND[kind].packed) for kind in QUANTIZED_KINDS]
    found += [_build(heads(256), kind, half, 16, rare=True) for kind in QUANTIZED_KINDS]
    found += [
        _build(heads(128, window=4096), "plain", half, 16, rare=True),
        _build(heads(256, cap=50.0), "plain", half, 16, rare=True),
        _build(heads(128), "plain", half, 256, rare=True),
        _build(heads(128), "plain", torch.float32, 16, rare=True),
        *(_build(heads(size), "plain", half, 16, code=torch.int8, rare=True) for size in (64, 128, 256)),
        *(
            _build(heads(128), "plain", half, 16, code=torch.float8_e4m3fn, by_block=blocks, rare=True)
            for blocks in (False, True)
        ),
        _build(Heads(32, 32, 128, 128**-0.5, None, None), "int8", half, 16, code=torch.int8, rare=True),
    ]
    return found


_TILES = (PromptTile(16, 16, 4, 1), PromptTile(32, 32, 4, 1))
KERNEL = Kernel(
    "attend_prompts",
    [
        *(_case(case, _TILES[i % 2]).case() for i, case in enumerate(attention_cases(singles=False))),
        *(
            _rounded_case(replace(attention_cases(singles=False)[i], note=""), code, blocks)
            for i, code, blocks in (
                (0, torch.int8, False),
                (4, torch.float8_e4m3fn, False),
                (3, torch.float8_e4m3fn, True),
            )
        ),
    ],
    _builds(),
)
