"""Overlap of launches: letting the next one begin early, and waiting for earlier ones (see launch.py)."""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Bytes of its weight that a program prefetches before it waits. About eight programs with four warps fit on a unit, so
# on 132 units they prefetch 17 MB, a third of an H100's L2 cache: nothing that is needed earlier is evicted.
AHEAD = tl.constexpr(16384)
_LINE = tl.constexpr(128)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The next launch may begin when every program of this one has come here: it takes what room they leave.

    Linears come here behind their loop. Where all kernels began with it, a decode step with tiles that were not tuned for
    that took 8% longer on an H100 than without any overlap, we think because several later launches at a time filled
    whatever unit had room first, and waited there (docs/gpu.md).
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """From here on everything is there that earlier launches wrote, and nobody reads any more what this one overwrites."""
    if PDL:
        gdc_wait()


@triton.jit
def wait_and_launch(PDL: tl.constexpr):
    """Both, first of all: for kernels that are short, or leave room. Not the other way round: a chain of launches would wait."""
    wait_for_earlier(PDL)
    launch_dependents(PDL)


@triton.jit
def prefetch(addresses):
    """Lines of 128 bytes to the second-level cache."""
    # What comes out is not used; without an output Triton takes no assembly.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_runs(pointer, first, last, stride, offset, RUN: tl.constexpr):
    """The beginning of a program's share of a packed weight.

    Args:
        pointer: the weight.
        first, last: the share's runs of ``RUN`` bytes, numbered through the weight.
        stride, offset: bytes from one run to the next, and to this program's place in one.
    """
    line = tl.arange(0, AHEAD // _LINE)
    OF_RUN: tl.constexpr = RUN // _LINE
    run = tl.minimum(first + line // OF_RUN, last).to(tl.int64)
    prefetch(pointer.to(tl.int64) + run * stride + offset + line % OF_RUN * _LINE)


@triton.jit
def prefetch_rows(pointer, row, first, last, width):
    """The beginning of a program's share of rows that lie one after another.

    Args:
        pointer: the weight.
        row: which rows.
        first, last: bytes of each.
        width: bytes from one row to the next.
    """
    EACH: tl.constexpr = max(1, AHEAD // (row.shape[0] * _LINE))  # pyright: ignore[reportAssignmentType]
    at = tl.minimum(first + tl.arange(0, EACH) * _LINE, last)
    prefetch(pointer.to(tl.int64) + row.to(tl.int64)[:, None] * width + at[None, :])
