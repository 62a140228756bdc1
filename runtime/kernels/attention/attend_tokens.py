"""Flash decoding: attention of single tokens to their sequences' cached positions.

The positions of a step's sequences are split into parts of about the same size, enough to fill the device
for any sequence lengths. A program has one part, with all query heads that share a key; the last
program of a sequence merges its parts. It may first norm and rotate the step's queries and keys, and store
keys and values, which saves a launch.
"""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...heads import Heads
from ..base.launch import Launch
from ..base.overlap import wait_and_launch
from ..base.targets import Target, target_of
from ..base.workspace import Workspace, workspace
from ..rows.cached import LayerCache, cached_rows, numbers_of, padded, store_key_and_value, storing
from ..rows.rotate_and_store import HeadNorms, RotaryTables, prepared, preparing
from ..tiles.attention_tiles import TokenTile, rows_of_group, token_tile
from .attend_prompts import attention_constants
from .flash import CHANGING, Runs, exponents, factor_of, unscaled

_FEW = tl.constexpr(8)  # parts that even a short sequence has
_MERGED = tl.constexpr(4096)  # numbers of parts that a program reads at once to merge them: as many as registers hold


def may_store(heads: Heads, target: Target) -> bool:
    """Whether the fused store needs no more rows, and programs can see each other's stores."""
    return target.splits and rows_of_group(heads.group + 2, target) == rows_of_group(heads.group, target)


@triton.jit
def _plan(
    counts,
    stops,
    sequences,
    programs,
    BATCH: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """How sequences are cut; each program finds it by itself, so that no host needs to be asked.

    Returns:
        For each sequence its positions, the first tile that is seen, the tiles of a part, and how many parts there are.
    """
    each = tl.arange(0, BATCH)
    there = each < sequences
    single = tl.load(counts + each, mask=there, other=0) == 1
    stop = tl.where(single, tl.load(stops + each, mask=there, other=0), 0)
    begin = tl.zeros([BATCH], tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(stop - WINDOW, 0) // BN
    tiles = tl.cdiv(stop, BN) - begin
    # A few parts are read together when they are merged, so that a short sequence may have them, too.
    few = tl.minimum(tl.maximum(tl.cdiv(tiles, _FEW), 1), LEAST)
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), programs), few)
    return stop, begin, size, tl.cdiv(tiles, size)


@triton.jit
def _my_part(
    item,
    counts,
    stops,
    sequences,
    programs,
    BATCH: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which sequence's positions a program has.

    Returns:
        Whether there is a part, the sequence, its positions, the first and last of the part, which of its parts it is, how many it
        has, and the number of its first part among all.
    """
    stop, begin, size, parts = _plan(counts, stops, sequences, programs, BATCH, BN, LEAST, WINDOW)
    ends = tl.cumsum(parts, 0)
    sequence = tl.sum((ends <= item).to(tl.int32), 0)
    mine = tl.arange(0, BATCH) == sequence
    first_part = tl.sum(tl.where(mine, ends - parts, 0), 0)
    my_parts = tl.sum(tl.where(mine, parts, 0), 0)
    my_stop = tl.sum(tl.where(mine, stop, 0), 0)
    my_size = tl.sum(tl.where(mine, size, 0), 0)
    part = item - first_part
    first = (tl.sum(tl.where(mine, begin, 0), 0) + part * my_size) * BN
    last = tl.minimum(first + my_size * BN, my_stop)
    return my_parts > 0, sequence, my_stop, first, last, part, my_parts, first_part


@triton.jit
def _over_positions(
    query,
    acc,
    highest,
    total,
    first,
    last,
    stop,
    table,
    head,
    keys,
    values,
    key_scales,
    value_scales,
    MASKED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What :func:`flash.over_positions` does, transposed: few queries are the narrow right operand of both products.

    Args:
        query: ``[DP, ROWS]``.
        acc: ``[DP, ROWS]``.
        total: ``[BN, ROWS]``: what each place in a tile adds up is added once, at the end.
    """
    FACTOR: tl.constexpr = factor_of(KIND, SCALE, CAP)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        rows = cached_rows(table, start, stop, head, SHARED, BLOCK, BN)
        seen = start + tl.arange(0, BN)
        valid = seen < stop
        found = numbers_of(keys, rows, valid, MASKED, KIND, D, DP, DOT, ASM)
        scores = tl.dot(found, query, input_precision="ieee")
        scores = exponents(scores, rows, valid, key_scales, value_scales, 1, MASKED, KIND, ASM, SCALE, CAP)
        if MASKED:
            mask = valid
            if WINDOW > 0:
                mask &= seen >= stop - WINDOW
            scores = tl.where(mask[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0) * FACTOR)
        if MASKED:
            # Queries that have seen nothing yet keep zeros instead of what infinities make.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        shares = tl.exp2(scores * FACTOR - base[None, :])
        shrink = tl.exp2(highest - base)
        total = total * shrink[None, :] + unscaled(shares, rows, valid, value_scales, 1, MASKED, KIND, ASM)
        found = numbers_of(values, rows, valid, MASKED, KIND, D, DP, DOT, ASM, True)
        acc = tl.dot(found, shares.to(DOT), acc * shrink[None, :], input_precision="ieee")
        highest = higher
    return acc, highest, total


@triton.jit
def _over_part(
    query,
    first,
    last,
    stop,
    table,
    head,
    keys,
    values,
    key_scales,
    value_scales,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All positions of a part: masked ones where a window begins inside a tile, whole tiles, and what is left."""
    acc = tl.zeros([DP, ROWS], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BN, ROWS], tl.float32)
    whole = tl.maximum(last // BN * BN, first)
    if WINDOW > 0:
        # The window's first position is inside its first tile.
        inner = tl.minimum(tl.where(first < stop - WINDOW, first + BN, first), last)
        whole = tl.maximum(whole, inner)
        acc, highest, total = _over_positions(
            query, acc, highest, total, first, inner, stop, table, head, keys, values, key_scales,
            value_scales, True, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
        )  # fmt: skip
        first = inner
    acc, highest, total = _over_positions(
        query, acc, highest, total, first, whole, stop, table, head, keys, values, key_scales,
        value_scales, False, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
    )  # fmt: skip
    return _over_positions(
        query, acc, highest, total, whole, last, stop, table, head, keys, values, key_scales,
        value_scales, True, SHARED, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
    )  # fmt: skip


@triton.jit
def _merged(
    sums,
    head,
    first_part,
    parts,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DP: tl.constexpr,
):
    """Of the parts of a sequence, each relative to its own highest score, the whole; always in the same order."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    real = row < GROUP
    acc = tl.zeros([ROWS, DP], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    SIZE: tl.constexpr = GROUP * (DP + 2)
    AT_ONCE: tl.constexpr = max(1, min(8, _MERGED // (ROWS * DP)))  # pyright: ignore[reportOperatorIssue]
    for i in tl.range(0, parts, loop_unroll_factor=AT_ONCE):
        base = sums + ((first_part + i).to(tl.int64) * SHARED + head) * SIZE
        theirs = tl.load(
            base + row[:, None] * DP + column[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg"
        )
        their_highest = tl.load(base + GROUP * DP + row, mask=real, other=0.0, cache_modifier=".cg")
        their_total = tl.load(base + GROUP * DP + GROUP + row, mask=real, other=1.0, cache_modifier=".cg")
        higher = tl.maximum(highest, their_highest)
        shrink = tl.exp2(highest - higher)
        their_shrink = tl.exp2(their_highest - higher)
        acc = acc * shrink[:, None] + theirs * their_shrink[:, None]
        total = total * shrink + their_total * their_shrink
        highest = higher
    return acc / total[:, None]


@triton.jit(do_not_specialize=CHANGING)
def _attend_tokens(
    x,
    keys,
    values,
    key_scales,
    value_scales,
    rows,
    counts,
    stops,
    tables,
    out,
    sums,
    arrived,
    rotary_rows,
    cosines,
    sines,
    query_weight,
    key_weight,
    hadamard,
    x_stride,
    tables_stride,
    sequences,
    programs,
    STORES: tl.constexpr,
    MERGES: tl.constexpr,
    QUERIES: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFT: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BATCH: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    head = tl.program_id(0)
    item = tl.program_id(1)
    there, sequence, stop, first, last, part, parts, first_part = _my_part(
        item, counts, stops, sequences, programs, BATCH, BN, LEAST, WINDOW
    )
    if there:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, DP)
        real = (row < GROUP)[:, None] & (column < D)[None, :]
        token = tl.load(rows + sequence)
        table = tables + sequence.to(tl.int64) * tables_stride
        if STORES:
            tile = prepared(
                x, token, head, rotary_rows, cosines, sines, query_weight, key_weight, hadamard, x_stride, QUERIES, SHARED,
                GROUP, ROWS, D, DP, HALF, NORM, EPS, ROUNDS_FIRST, ROTATED,
            )  # fmt: skip
            if part == parts - 1:
                slot = stop - 1
                block = tl.load(table + slot // BLOCK).to(tl.int64)
                place = (block * SHARED + head) * BLOCK + slot % BLOCK
                store_key_and_value(
                    tile, keys, values, key_scales, value_scales, place, GROUP, D, DP, KIND, LIMIT, SOFT
                )
                # Only this program reads them in this step, and from here on it may.
                tl.debug_barrier()
            query = tl.trans(tile.to(x.dtype.element_ty).to(DOT))
        else:
            at = x + token.to(tl.int64) * x_stride + (head * GROUP + row)[:, None] * D + column[None, :]
            query = tl.trans(tl.load(at, mask=real, other=0.0).to(DOT))
        acc, highest, total = _over_part(
            query, first, last, stop, table, head, keys, values, key_scales, value_scales,
            SHARED, ROWS, BLOCK, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW, STAGES,
        )  # fmt: skip
        acc, total = tl.trans(acc), tl.sum(total, 0)
        to = out + token.to(tl.int64) * (QUERIES * D) + (head * GROUP + row)[:, None] * D + column[None, :]
        if parts == 1:
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        else:
            SIZE: tl.constexpr = GROUP * (DP + 2)
            base = sums + (item.to(tl.int64) * SHARED + head) * SIZE
            tl.store(base + row[:, None] * DP + column[None, :], acc, mask=(row < GROUP)[:, None])
            tl.store(base + GROUP * DP + row, highest, mask=row < GROUP)
            tl.store(base + GROUP * DP + GROUP + row, total, mask=row < GROUP)
            if MERGES:
                # All threads' stores come before the one that counts.
                tl.debug_barrier()
                if tl.atomic_add(arrived + sequence * SHARED + head, 1, sem="acq_rel") == parts - 1:
                    found = _merged(sums, head, first_part, parts, SHARED, GROUP, ROWS, DP)
                    tl.store(to, found.to(out.dtype.element_ty), mask=real)
                    tl.store(arrived + sequence * SHARED + head, 0)


@triton.jit(do_not_specialize=CHANGING)
def _merge(
    rows,
    counts,
    stops,
    out,
    sums,
    sequences,
    programs,
    QUERIES: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BATCH: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """What the last program of a sequence does, as a launch of its own."""
    wait_and_launch(PDL)
    head = tl.program_id(0)
    wanted = tl.program_id(1)
    each = tl.arange(0, BATCH)
    _, _, _, parts = _plan(counts, stops, sequences, programs, BATCH, BN, LEAST, WINDOW)
    first_part = tl.sum(tl.where(each < wanted, parts, 0), 0)
    my_parts = tl.sum(tl.where(each == wanted, parts, 0), 0)
    if my_parts > 1:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, DP)
        found = _merged(sums, head, first_part, my_parts, SHARED, GROUP, ROWS, DP)
        token = tl.load(rows + wanted).to(tl.int64)
        to = out + token * (QUERIES * D) + (head * GROUP + row)[:, None] * D + column[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=(row < GROUP)[:, None] & (column < D)[None, :])


@dataclass(frozen=True)
class Storing:
    """The fused processing of a step's queries and keys."""

    norms: HeadNorms | None
    rotary: RotaryTables | None


def launches(
    x: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    out: Tensor,
    tile: TokenTile,
    target: Target,
    space: Workspace,
    storing_too: Storing | None = None,
) -> list[Launch]:
    """One step's, ready to run: one launch, or two where programs cannot see each other's stores."""
    sequences = runs.rows.shape[0]
    programs = max(1, target.units * tile.waves // heads.shared)
    items = programs + sequences
    sums, arrived = space.reserve(items * heads.queries * (padded(heads.size) + 2), sequences * heads.shared)
    constants = {
        **attention_constants(x.dtype, heads, cache),
        "ROWS": rows_of_group(heads.group + (0 if storing_too is None else 2), target),
        "BATCH": triton.next_power_of_2(sequences),
        "BN": tile.positions,
        "LEAST": tile.least,
    }
    preparation, how = preparing(
        heads, cache, *((None, None) if storing_too is None else (storing_too.norms, storing_too.rotary)), x.dtype
    )
    arguments: dict[str, Tensor | int | None] = {
        **preparation,
        **cache.arguments(),
        **runs.arguments(),
        "x": x,
        "out": out,
        "sums": sums,
        "arrived": arrived,
        "x_stride": x.stride(0),
        "sequences": sequences,
        "programs": programs,
    }
    stores = storing_too is not None
    attend = Launch(
        _attend_tokens,
        arguments,
        {**how, **constants, **storing(cache), "STORES": stores, "MERGES": target.splits, "STAGES": tile.stages},
        (heads.shared, items),
        tile.warps,
        tile.stages,
    )
    if target.splits:
        return [attend]
    names = _merge.arg_names
    own = {name: value for name, value in arguments.items() if name in names}
    return [
        attend,
        Launch(
            _merge,
            own,
            {name: value for name, value in constants.items() if name in names},
            (heads.shared, sequences),
            4,
            1,
        ),
    ]


def attend_tokens(
    x: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    out: Tensor,
    *,
    storing_too: Storing | None = None,
    tile: TokenTile | None = None,
    target: Target | None = None,
) -> Tensor:
    """Attention of the runs with a single token to their sequences' cached positions, including their own.

    Args:
        x: queries ``[tokens, query heads x size]``; or, with ``storing_too``, the inputs of :func:`rotate_and_store`.
        heads: the layer's.
        cache: the layer's.
        runs: all of the step's; those with other counts are skipped.
        out: ``[tokens, query heads x size]``, of which the runs' rows are written.
        storing_too: norm and rotate queries and keys, and store keys and values, in the same launch.
        tile: the tile of positions; by default the device's.
        target: where it is launched; by default the device.
    """
    target = target or target_of(x.device)
    tile = tile or token_tile(target, heads, x.dtype, cache.kind)
    for one in launches(x, heads, cache, runs, out, tile, target, workspace(x.device), storing_too):
        one.run()
    return out
