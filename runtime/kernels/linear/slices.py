"""Linears of a few rows: each warp has columns of its own, so that none waits for another before the sums are added up.

What a warp loads already lies in the registers that its tensor core reads, weights as they are packed and inputs as they are.
An iteration's weights and scales are loaded one iteration before, and the first ones before the launch waits for earlier ones.
"""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .codes import pieces_of, scale_of, scaled

# Threads are laid along a tensor's dimensions one after another, lanes first, then warps, and what is left goes to registers:
# from the last dimension on since Triton 3.7, before from the first on (but always along the contiguous one first of all).
# `smelt kernels check` shows whether threads hold what they multiply.
_LAST_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@triton.jit
def _pointers(codes, block, n0, ROWS: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr):
    """Where threads find their words of a block ``[SLICES, 1]``."""
    place, word = (block * ROWS + n0) * 16, tl.arange(0, 8)[None, None, None, :]
    lane, tile = tl.arange(0, 32) * 8, tl.arange(0, BN // 16) * 256
    if _LAST_FIRST:
        return codes + (place[None, :, :, None] + (tile[:, None, None, None] + lane[None, None, :, None] + word))
    else:
        return codes + (place[None, :, :, None] + (lane[:, None, None, None] + tile[None, None, :, None] + word))


@triton.jit
def _once(pointers, wanted):
    """Read what nobody else reads. By this policy check.py recognizes weights, which may be read before the wait for earlier launches."""
    return tl.load(pointers, mask=wanted, other=0, eviction_policy="evict_first")


@triton.jit
def _words(pointers, wanted, SLICES: tl.constexpr, BN: tl.constexpr):
    """``[SLICES, BN, 16]`` words, in the order of the threads (see unpack.py)."""
    words = _once(pointers, wanted)
    # Of a thread: half of the columns, half of the rows, column of a pair.
    if _LAST_FIRST:
        words = tl.permute(tl.reshape(words, [BN // 16, SLICES, 8, 4, 2, 2, 2]), [1, 0, 5, 2, 4, 3, 6])
    else:
        words = tl.permute(tl.reshape(words, [8, 4, SLICES, BN // 16, 2, 2, 2]), [2, 3, 5, 0, 4, 1, 6])
    return tl.reshape(words, [SLICES, BN, 16])


@triton.jit
def _inputs(x, row, x_stride, k, SLICES: tl.constexpr):
    """Where threads find the first 16 columns of each slice, as a right operand holds them; ``k [SLICES, 1]`` is the first."""
    four, half, pair = tl.arange(0, 4) * 2, tl.arange(0, 2) * 8, tl.arange(0, 2)[None, None, None, None, :]
    rows = row.to(tl.int64) * x_stride
    if _LAST_FIRST:
        column = k[None, :, :, None, None] + (half[:, None, None, None, None] + four[None, None, None, :, None] + pair)
        return x + (rows[None, None, :, None, None] + column)
    else:
        column = k[None, None, :, :, None] + (four[:, None, None, None, None] + half[None, None, None, :, None] + pair)
        return x + (rows[None, :, None, None, None] + column)


@triton.jit
def _operand(loaded, SLICES: tl.constexpr, BM: tl.constexpr):
    """``[SLICES, 16, BM]`` of what is loaded from :func:`_inputs`."""
    if _LAST_FIRST:
        return tl.reshape(tl.permute(loaded, [1, 0, 3, 4, 2]), [SLICES, 16, BM])
    else:
        return tl.reshape(tl.permute(loaded, [2, 3, 0, 4, 1]), [SLICES, 16, BM])


@triton.jit
def _load(
    codes,
    more,
    scales,
    step,
    wanted,
    n0,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    COVERS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """A tuple for each of an iteration's blocks, of its packed words, and then one for each word of its scales.

    Args:
        codes, more: pointers to the words of its first block.
        step: ``[SLICES, 1]``, which iteration of all.
        wanted: whether there is one; zeros if not.
    """
    OF_BLOCK: tl.constexpr = ROWS * 16  # pyright: ignore[reportAssignmentType]
    loaded = ()
    for b in tl.static_range(STEP // BLOCK):
        if FORMAT == "int8" or FORMAT == "float8" or FORMAT == "int3":
            first = _words(codes + 2 * b * OF_BLOCK, wanted, SLICES, BN)
            second = _words(codes + (2 * b + 1) * OF_BLOCK, wanted, SLICES, BN)
            if FORMAT == "int3":
                loaded = loaded + ((first, second, _words(more + b * OF_BLOCK, wanted, SLICES, BN)),)  # noqa: RUF005
            else:
                loaded = loaded + ((first, second),)  # noqa: RUF005
        elif FORMAT == "nested8":
            first = _words(codes + b * OF_BLOCK, wanted, SLICES, BN)
            loaded = loaded + ((first, _words(more + b * OF_BLOCK, wanted, SLICES, BN)),)  # noqa: RUF005
        else:
            loaded = loaded + ((_words(codes + b * OF_BLOCK, wanted, SLICES, BN),),)  # noqa: RUF005
    if KIND != "none":
        WITHIN: tl.constexpr = COVERS if COVERS < STEP else STEP
        first_word = scales + (step * STEP // COVERS * ROWS + (n0 + tl.arange(0, BN)[None, :]))
        for g in tl.static_range(STEP // WITHIN):
            loaded = loaded + ((_once(first_word + g * ROWS, wanted),),)  # noqa: RUF005
    return loaded


@triton.jit
def begin_slices(
    codes,
    more,
    scales,
    part,
    steps,
    n0,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    COVERS: tl.constexpr,
    SLICES: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Load the weights of a program's first iteration; with ``DEEP`` of the second, too, so that these are requested before the inputs.

    Args:
        part, steps: which part of the iterations the program has, and how many there are for all of them.

    Returns:
        Pointers to the words of its first block, and what is loaded of both iterations, for :func:`sum_slices`.
    """
    step = part * (EACH * SLICES) + tl.arange(0, SLICES)[:, None]
    block = step * (STEP // BLOCK)
    if FORMAT == "int8" or FORMAT == "float8" or FORMAT == "int3":
        my_codes = _pointers(codes, 2 * block, n0, ROWS, BN, SLICES)
    else:
        my_codes = _pointers(codes, block, n0, ROWS, BN, SLICES)
    # Of unequal parts the last ones may have none.
    wanted = True if EVEN else part * EACH < steps
    my_more = my_codes if more is None else _pointers(more, block, n0, ROWS, BN, SLICES)
    loaded = _load(my_codes, my_more, scales, step, wanted, n0, ROWS, STEP, BLOCK, BN, FORMAT, KIND, COVERS, SLICES)
    second = loaded
    if DEEP and EACH > 1:
        FURTHER: tl.constexpr = SLICES * (STEP // BLOCK) * ROWS * 16  # pyright: ignore[reportAssignmentType]
        PLANES: tl.constexpr = 2 if FORMAT == "int8" or FORMAT == "float8" or FORMAT == "int3" else 1  # pyright: ignore[reportAssignmentType]
        second = _load(
            my_codes + FURTHER * PLANES, my_more + FURTHER, scales, step + SLICES,
            True if EVEN else part * EACH + 1 < steps, n0, ROWS, STEP, BLOCK, BN, FORMAT, KIND, COVERS, SLICES,
        )  # fmt: skip
    return my_codes, my_more, loaded, second


@triton.jit
def _add_products(
    acc,
    words,
    inputs,
    column,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FOLD: tl.constexpr,
    COVERS: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """``acc [SLICES, BN, BM]`` and an iteration's products.

    Args:
        words: what :func:`_load` returned.
        inputs: a tuple of ``[SLICES, 16, BM]``.
        column: ``[SLICES, 1]``, the iteration's first of each slice.
    """
    WITHIN: tl.constexpr = COVERS if COVERS < STEP else STEP
    WHOLE: tl.constexpr = STEP % COVERS == 0
    WIDE: tl.constexpr = G if G < STEP else STEP
    part_of_group = tl.zeros_like(acc)
    # Index expressions are written out, since a variable would not stay a constant.
    for b in tl.static_range(STEP // BLOCK):
        pieces = pieces_of(words[b], FORMAT, HALF, ASM)
        for i in tl.static_range(BLOCK // 16):
            piece = pieces[i]
            if KIND == "none":
                acc = tl.dot(piece, inputs[b * (BLOCK // 16) + i], acc)
            else:
                word = words[STEP // BLOCK + (b * BLOCK + i * 16) // WITHIN][0]
                if WHOLE:
                    at = (b * BLOCK + i * 16) % COVERS // G
                else:
                    at = (column + (b * BLOCK + i * 16)) % COVERS // G
                if FOLD or KIND == "zero":
                    piece = scaled(piece, word, at, KIND, SCALE_TYPE, HALF, FOLD, ASM)
                if FOLD:
                    acc = tl.dot(piece, inputs[b * (BLOCK // 16) + i], acc)
                else:
                    # A group's weights are whole numbers; it is scaled when it is summed up.
                    if (b * BLOCK + i * 16) % WIDE == 0:
                        part_of_group = tl.zeros_like(acc)
                    part_of_group = tl.dot(piece, inputs[b * (BLOCK // 16) + i], part_of_group)
                    if (b * BLOCK + i * 16 + 16) % WIDE == 0:
                        acc += part_of_group * tl.expand_dims(scale_of(word, at, KIND, SCALE_TYPE), 2)
    return acc


@triton.jit
def sum_slices(
    begun,
    x,
    row,
    x_stride,
    valid,
    scales,
    part,
    steps,
    n0,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FOLD: tl.constexpr,
    COVERS: tl.constexpr,
    SLICES: tl.constexpr,
    DEEP: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """``[BN, BM]`` sums of products over a program's iterations, of which each slice has its own columns.

    Args:
        begun: what :func:`begin_slices` returned.
        row, valid: ``[BM]``, which rows of inputs, and which of them are real.
        part, steps: which part of the iterations the program has, and how many there are for all of them.
    """
    codes, more, ready, second = begun
    step = part * (EACH * SLICES) + tl.arange(0, SLICES)[:, None]
    first_inputs = _inputs(x, row, x_stride, step * STEP, SLICES)
    real = valid[None, None, :, None, None] if _LAST_FIRST else valid[None, :, None, None, None]
    FURTHER: tl.constexpr = SLICES * (STEP // BLOCK) * ROWS * 16  # pyright: ignore[reportAssignmentType]
    TWICE: tl.constexpr = FORMAT == "int8" or FORMAT == "float8" or FORMAT == "int3"
    PLANES: tl.constexpr = 2 if TWICE else 1  # pyright: ignore[reportAssignmentType]
    AHEAD: tl.constexpr = 2 if DEEP else 1  # pyright: ignore[reportAssignmentType]
    acc = tl.zeros([SLICES, BN, BM], tl.float32)
    for s in tl.range(0, EACH, num_stages=1):
        words = ready
        there = real if EVEN else real & (part * EACH + s < steps)
        inputs = ()
        for i in tl.static_range(STEP // 16):
            x_part = tl.load(first_inputs + s * (SLICES * STEP) + i * 16, mask=there, other=0.0)
            inputs = inputs + (_operand(x_part, SLICES, BM).to(HALF),)  # noqa: RUF005
        if DEEP:
            ready = second
        if EACH > AHEAD:
            later = s + AHEAD
            wanted = later < EACH if EVEN else (later < EACH) & (part * EACH + later < steps)
            found = _load(
                codes + later * (FURTHER * PLANES), more + later * FURTHER, scales, step + later * SLICES, wanted, n0,
                ROWS, STEP, BLOCK, BN, FORMAT, KIND, COVERS, SLICES,
            )  # fmt: skip
            if DEEP:
                second = found
            else:
                ready = found
        acc = _add_products(
            acc, words, inputs, (step + s * SLICES) * STEP,
            STEP, BLOCK, FORMAT, KIND, G, SCALE_TYPE, FOLD, COVERS, HALF, ASM,
        )  # fmt: skip
    return tl.sum(acc, 0)
