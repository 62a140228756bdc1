"""The FLAT dataflow of attention: a whole tile of rows of scores, then its softmax, then the product with the values.

The three are fused for each tile of queries, as in FLAT (Kao and others, 2021, row granularity): the tile's scores stay
in scratch memory that few programs reuse (up to about 1500 positions it fits an H100's L2 cache), and no sum is ever
rescaled, since the highest score of a row is known before its softmax begins. Flash attention (:mod:`attend_prompts`)
stores no scores, and rescales. Inputs and outputs are the same; which one is faster must be measured.
"""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache_types import BY_KIND, SELECTABLE_KINDS
from ...heads import Heads
from ..base.kernel import Build, Kernel
from ..base.launch import Launch
from ..base.overlap import wait_and_launch
from ..base.products import finished
from ..base.targets import Target, splitting, target_of
from ..base.workspace import Workspace, workspace
from ..rows.cached import LayerCache, cached_rows, numbers_of, padded
from ..tiles.attention_tiles import PromptTile, prompt_tile
from .attend_prompts import attention_constants, tile_of_queries, work_of
from .case import AttentionCase, attention_cases
from .flash import CHANGING, Runs, factor_of, scores_of, unscaled

_SCRATCH = 1 << 27  # scores of all programs together, at most


@triton.jit(do_not_specialize=CHANGING)
def _attend_rows(
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
    scratch,
    tables_stride,
    scratch_stride,
    items,
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
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.arange(0, BM)
    inner = tl.arange(0, BN)
    scratch_stride = tl.multiple_of(scratch_stride, 16)
    mine = scratch + tl.program_id(0).to(tl.int64) * BM * scratch_stride
    # A program's scratch serves one tile after another, so that few of them are in use at once.
    for both in range(tl.program_id(0), items * SHARED, tl.num_programs(0)):
        item = both // SHARED
        head = both % SHARED
        if tl.load(work + 2 * item) >= 0:
            query, position, to, inside, sequence, stop, begin, last = tile_of_queries(
                queries, work, item, rows, counts, stops, head, QUERIES, GROUP, D, DP, DOT, BM
            )
            table = tables + sequence.to(tl.int64) * tables_stride
            first = 0
            if WINDOW > 0:
                first = tl.maximum(begin - WINDOW + 1, 0) // BN * BN
            highest = tl.full([BM], float("-inf"), tl.float32)
            for start in tl.range(first, last, BN, num_stages=STAGES):
                at = cached_rows(table, start, stop, head, SHARED, BLOCK, BN)
                scores = scores_of(
                    query, position, start, stop, at, keys, key_scales, value_scales, True, KIND, D, DP, DOT, ASM, BN,
                    SCALE, CAP, WINDOW,
                )  # fmt: skip
                highest = tl.maximum(highest, tl.max(scores, 1))
                tl.store(mine + row[:, None] * scratch_stride + (start + inner)[None, :], scores)
            # The second pass reads what other threads of this program wrote.
            tl.debug_barrier()
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, DP], tl.float32)
            FACTOR: tl.constexpr = factor_of(KIND, SCALE, CAP)
            highest = tl.where(highest == float("-inf"), 0.0, highest * FACTOR)
            for start in tl.range(first, last, BN, num_stages=STAGES):
                at = cached_rows(table, start, stop, head, SHARED, BLOCK, BN)
                scores = tl.load(mine + row[:, None] * scratch_stride + (start + inner)[None, :])
                shares = tl.exp2(scores * FACTOR - highest[:, None])
                valid = start + inner < stop
                total += tl.sum(unscaled(shares, at, valid, value_scales, 0, True, KIND, ASM), 1)
                found = numbers_of(values, at, valid, True, KIND, D, DP, DOT, ASM)
                acc = finished(tl.dot(shares.to(DOT), found, acc, input_precision="ieee"), ASM)
            tl.debug_barrier()
            tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def row_tile(target: Target, heads: Heads, dtype: torch.dtype, kind: str) -> PromptTile:
    """A tile with fewer rows than flash attention's, as each row stores all its scores."""
    found = prompt_tile(target, heads, dtype, kind)
    small = min(found.queries, 64 if padded(heads.size) <= 128 else 32)
    queries = max(small, 1 << (heads.group - 1).bit_length())
    most = {"sm_80": (64, 16), "sm_100": (32, 32)}.get(target.name, (64, 32))[kind != "plain"]
    positions = min(found.positions, most)
    return replace(
        found,
        queries=queries,
        positions=positions,
        warps=4 if padded(heads.size) <= 128 else 8,
        stages=2 if target.name == "sm_100" else 4,
    )


def launch(
    queries: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    work: Tensor,
    out: Tensor,
    tile: PromptTile,
    target: Target,
    space: Workspace,
    longest: int,
) -> Launch:
    """One step's, ready to run."""
    stride = -(-longest // tile.positions) * tile.positions
    programs = min(target.units, work.shape[0] * heads.shared, max(1, _SCRATCH // (tile.queries * stride)))
    scratch, _ = space.reserve(programs * tile.queries * stride, 1)
    if not queries.is_contiguous():
        raise ValueError("queries must be contiguous")
    arguments: dict[str, Tensor | int | None] = {
        "queries": queries,
        "work": work,
        "out": out,
        "scratch": scratch,
        "scratch_stride": stride,
        "items": work.shape[0],
        **cache.arguments(),
        **runs.arguments(),
    }
    constants = {
        **attention_constants(queries.dtype, heads, cache),
        "BM": tile.queries,
        "BN": tile.positions,
        "STAGES": tile.stages,
    }
    return Launch(_attend_rows, arguments, constants, (programs,), tile.warps, tile.stages)


def attend_rows(
    queries: Tensor,
    heads: Heads,
    cache: LayerCache,
    runs: Runs,
    work: Tensor,
    out: Tensor,
    tile: PromptTile | None = None,
    *,
    longest: int | None = None,
) -> Tensor:
    """:func:`attend_prompts` with FLAT's dataflow.

    Args:
        queries, heads, cache, runs, work, out, tile: as there.
        longest: positions of the longest sequence; by default the tables' capacity.
    """
    target = target_of(queries.device)
    tile = tile or row_tile(target, heads, queries.dtype, cache.kind)
    longest = longest or runs.tables.shape[1] * cache.block
    if work.shape[0]:
        launch(queries, heads, cache, runs, work, out, tile, target, workspace(queries.device), longest).run()
    return out


def _case(case: AttentionCase) -> AttentionCase:
    tile = PromptTile(16, 16, 4, 1)

    def compute(queries: Tensor, cache: LayerCache, runs: Runs, out: Tensor) -> None:
        counts, stops = runs.counts.tolist(), runs.stops.tolist()
        work = torch.tensor([*work_of(counts, stops, tile.tokens(case.heads.group)), (-1, 0)], dtype=torch.int32)
        attend_rows(queries, case.heads, cache, runs, work.to(queries.device), out, tile, longest=max(stops))

    return replace(case, note=", by rows").computed_by(compute)


def _build(size: int, kind: str) -> Build:
    heads, dtype = Heads(32, 8, size, size**-0.5, None, None), torch.bfloat16
    case = AttentionCase(heads, kind, dtype, 16, ((512, 512),), ", by rows")

    def on_meta(target: Target) -> Launch:
        queries, cache, runs, out = case.on_meta()
        work = torch.empty(64, 2, dtype=torch.int32, device="meta")
        tile, space = row_tile(target, heads, dtype, kind), Workspace(torch.device("meta"))
        return launch(queries, heads, cache, runs, work, out, tile, target, space, 4096)

    # A barrier does not make one wave's stores visible to another on AMD's GPUs.
    targets = splitting(case.targets)
    return Build(
        case.name,
        on_meta,
        matrix=True,
        streamed=("keys",) if kind == "plain" else (),
        targets=targets,
        rare=size != 128 or kind != "plain",
    )


KERNEL = Kernel(
    "attend_rows",
    [replace(_case(case).case(), targets=splitting(case.targets)) for case in attention_cases(singles=False)[:5]]
    + [
        replace(_case(case).case(), targets=splitting(()))
        for case in attention_cases(singles=False)
        if BY_KIND[case.kind].packed
    ],
    [_build(64, "plain"), _build(256, "plain"), *(_build(128, kind) for kind in SELECTABLE_KINDS)],
)
