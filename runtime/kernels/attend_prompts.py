"""Attention of runs of tokens to all that their sequences hold: flash attention, which never writes scores down.

A program has a tile of queries, those heads of a group together that share a key, and goes over the
positions that they see.
"""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..heads import Heads
from .attention_case import AttentionCase, attention_cases
from .attention_tiles import PromptTile, prompt_tile
from .cached import LayerCache
from .flash import CHANGING, Runs, dot_types, over_positions
from .kernel import Build, Kernel
from .launch import Launch, takes_ptx
from .targets import Target, target_of


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
):
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


def launch(
    queries: Tensor, heads: Heads, cache: LayerCache, runs: Runs, work: Tensor, out: Tensor, tile: PromptTile
) -> Launch:
    """One step's, ready to run."""
    if not queries.is_contiguous():
        raise ValueError("queries must follow one another")
    arguments: dict[str, Tensor | int | None] = {
        "queries": queries,
        "work": work,
        "out": out,
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
        },
        (heads.shared, work.shape[0]),
        tile.warps,
        tile.stages,
    )


def attention_constants(dtype: torch.dtype, heads: Heads, cache: LayerCache) -> dict[str, object]:
    """What all attention kernels must know of a layer."""
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
    """The tiles of some runs, as pairs of a run and its first token; those that see most come first.

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
) -> Tensor:
    """Attention of some runs' tokens, causal, to what their sequences hold, themselves included.

    Args:
        queries: ``[tokens, query heads x size]``.
        heads: the layer's.
        cache: the layer's; the runs' own keys and values are in it.
        runs: all of the step's.
        work: int32 ``[tiles, 2]`` of :func:`work_of`; -1 for no tile.
        out: ``[tokens, query heads x size]``, of which the runs' rows are written.
        tile: how queries and positions are cut; by default the device's.
    """
    tile = tile or prompt_tile(target_of(queries.device), heads, queries.dtype, cache.kind)
    if work.shape[0]:
        launch(queries, heads, cache, runs, work, out, tile).run()
    return out


def _case(case: AttentionCase, tile: PromptTile) -> AttentionCase:
    def compute(queries: Tensor, cache: LayerCache, runs: Runs, out: Tensor) -> None:
        counts, stops = runs.counts.tolist(), runs.stops.tolist()
        work = torch.tensor([*work_of(counts, stops, tile.tokens(case.heads.group)), (-1, 0)], dtype=torch.int32)
        attend_prompts(queries, case.heads, cache, runs, work.to(queries.device), out, tile)

    return case.computed_by(compute)


def _build(heads: Heads, kind: str, dtype: torch.dtype, block: int, *, rare: bool = False) -> Build:
    case = AttentionCase(heads, kind, dtype, block, ((512, 512),))

    def on_meta(target: Target) -> Launch:
        queries, cache, runs, out = case.on_meta()
        work = torch.empty(64, 2, dtype=torch.int32, device="meta")
        return launch(queries, heads, cache, runs, work, out, prompt_tile(target, heads, dtype, kind))

    halves = dtype != torch.float32
    return Build(
        case.name,
        on_meta,
        matrix=halves,
        streamed=("keys",) if halves and kind == "plain" else (),
        wide=False,
        targets=case.targets,
        rare=rare,
        overlapped=halves,
    )


def _builds() -> list[Build]:
    def heads(size: int, **changes: object) -> Heads:
        return Heads(32, 8, size, size**-0.5, **{"window": None, "cap": None, **changes})  # pyright: ignore[reportArgumentType]

    half = torch.bfloat16
    found = [_build(heads(size), "plain", half, 16, rare=size != 128) for size in (64, 80, 96, 128, 256)]
    found += [
        _build(heads(128), kind, half, 16, rare=kind != "int4") for kind in ("int8", "float8", "float8 fnuz", "int4")
    ]
    found += [_build(heads(256), kind, half, 16, rare=True) for kind in ("int8", "float8", "float8 fnuz", "int4")]
    found += [
        _build(heads(128, window=4096), "plain", half, 16, rare=True),
        _build(heads(256, cap=50.0), "plain", half, 16, rare=True),
        _build(heads(128), "plain", half, 256, rare=True),
        _build(heads(128), "plain", torch.float32, 16, rare=True),
    ]
    return found


_TILES = (PromptTile(16, 16, 4, 1), PromptTile(32, 32, 4, 1))
KERNEL = Kernel(
    "attend_prompts",
    [_case(case, _TILES[i % 2]).case() for i, case in enumerate(attention_cases(singles=False))],
    _builds(),
)
