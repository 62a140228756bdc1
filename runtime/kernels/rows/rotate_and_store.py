"""The operations between a layer's QKV projection and its attention: query and key norms, RoPE, and the store
to the cache, in one launch, or fused with attention."""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache_types import BY_KIND, QUANTIZED_KINDS, SELECTABLE_KINDS
from ...heads import Heads
from ..base.kernel import Build, Case, Kernel, PreparedCase
from ..base.launch import Launch, interpreted
from ..base.overlap import wait_and_launch
from ..base.targets import Target
from .cached import LayerCache, layer_cache, padded, restored, rotation, store_key_and_value, storing, targets_of


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of queries and keys.

    Attributes:
        queries, keys: float32 weights, of a head or of all heads.
        eps: added to the mean square.
        whole: whether all heads of a token are one row.
        rounds_first: whether the quotient is rounded to the compute dtype before it is multiplied.
    """

    queries: Tensor
    keys: Tensor
    eps: float
    whole: bool
    rounds_first: bool


@dataclass(frozen=True)
class RotaryTables:
    """Rotary positions.

    Attributes:
        cosines, sines: ``[rows, rotated / 2]``.
        rows: int32, which of them each token takes.
    """

    cosines: Tensor
    sines: Tensor
    rows: Tensor


@triton.jit
def _whole_inverse(x, count, eps):
    """The reciprocal root mean square of ``count`` numbers."""
    squares = tl.zeros([1024], tl.float32)
    for start in range(0, count, 1024):
        columns = start + tl.arange(0, 1024)
        part = tl.load(x + columns, mask=columns < count, other=0.0).to(tl.float32)
        squares += part * part
    return tl.rsqrt(tl.sum(squares, 0) / count + eps)


@triton.jit
def prepared(
    x,
    token,
    head,
    rotary_rows,
    cosines,
    sines,
    query_weight,
    key_weight,
    hadamard,
    x_stride,
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
):
    """float32 ``[ROWS, DP]``: the queries of a token that share a key, that key, its value, as attention wants them; zeros."""
    rotary_row = 0
    if HALF > 0:
        rotary_row = tl.load(rotary_rows + token)
    x += token.to(tl.int64) * x_stride
    if HALF > 0:
        cosines += rotary_row.to(tl.int64) * HALF
        sines += rotary_row.to(tl.int64) * HALF
    NARROW: tl.constexpr = x.dtype.element_ty
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    is_key = row == GROUP
    is_value = row == GROUP + 1
    of_head = tl.where(is_key, QUERIES + head, tl.where(is_value, QUERIES + SHARED + head, head * GROUP + row))
    inside = (row < GROUP + 2)[:, None] & (column < D)[None, :]
    pointers = x + of_head[:, None] * D
    values = tl.load(pointers + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = column < 2 * HALF
    # Each number's partner is loaded once more, instead of being fetched from another thread.
    other = tl.where(column < HALF, column + HALF, column - HALF)
    partners = tl.zeros([ROWS, DP], tl.float32)
    if HALF > 0:
        partners = tl.load(pointers + other[None, :], mask=inside & rotated[None, :], other=0.0).to(tl.float32)
    found = values
    if NORM != "none":
        if NORM == "head":
            inverse = tl.rsqrt(tl.sum(values * values, 1) / D + EPS)
            at = tl.zeros([ROWS], tl.int32)
        else:
            of_queries = _whole_inverse(x, QUERIES * D, EPS)
            of_keys = _whole_inverse(x + QUERIES * D, SHARED * D, EPS)
            inverse = tl.where(is_key, of_keys, of_queries)
            at = tl.where(is_key, head, head * GROUP + row) * D
        is_query = (row < GROUP)[:, None] & (column < D)[None, :]
        of_key = is_key[:, None] & (column < D)[None, :]
        weight = tl.load(query_weight + at[:, None] + column[None, :], mask=is_query, other=0.0)
        weight += tl.load(key_weight + at[:, None] + column[None, :], mask=of_key, other=0.0)
        found = values * inverse[:, None]
        if HALF > 0:
            swapped = tl.load(
                query_weight + at[:, None] + other[None, :], mask=is_query & rotated[None, :], other=0.0
            ) + tl.load(key_weight + at[:, None] + other[None, :], mask=of_key & rotated[None, :], other=0.0)
            partners = partners * inverse[:, None]
            if ROUNDS_FIRST:
                partners = partners.to(NARROW).to(tl.float32) * swapped.to(NARROW).to(tl.float32)
            else:
                partners = partners * swapped
            partners = partners.to(NARROW).to(tl.float32)
        if ROUNDS_FIRST:
            found = found.to(NARROW).to(tl.float32) * weight.to(NARROW).to(tl.float32)
        else:
            found = found * weight
        found = found.to(NARROW).to(tl.float32)
    if HALF > 0:
        frequency = tl.where(column < HALF, column, column - HALF)
        cosine = tl.load(cosines + frequency, mask=rotated, other=1.0).to(tl.float32)
        sine = tl.load(sines + frequency, mask=rotated, other=0.0).to(tl.float32)
        sine = tl.where(column < HALF, -sine, sine)
        found = found * cosine[None, :] + partners * sine[None, :]
        found = found.to(NARROW).to(tl.float32)
    if ROTATED > 0:
        SIDE: tl.constexpr = ROTATED if ROTATED > 16 else 16  # pyright: ignore[reportAssignmentType]
        inner = tl.arange(0, SIDE)
        matrix = tl.load(hadamard + inner[:, None] * SIDE + inner[None, :])
        # Its entries are ones, and what comes in has been rounded already, so that the product rounds nothing.
        by_side = tl.reshape(found, [ROWS * DP // SIDE, SIDE]).to(matrix.dtype)
        found = tl.reshape(tl.dot(by_side, matrix, input_precision="ieee"), [ROWS, DP]) * (1.0 / tl.sqrt(ROTATED * 1.0))
    return tl.where(is_value[:, None], values, found)


@triton.jit
def _rotate_and_store(
    x,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    rotary_rows,
    cosines,
    sines,
    query_weight,
    key_weight,
    hadamard,
    x_stride,
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
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        tile = prepared(
            x, token, head, rotary_rows, cosines, sines, query_weight, key_weight, hadamard, x_stride, QUERIES, SHARED,
            GROUP, ROWS, D, DP, HALF, NORM, EPS, ROUNDS_FIRST, ROTATED,
        )  # fmt: skip
        row = tl.arange(0, ROWS)
        column = tl.arange(0, DP)
        to = queries + token.to(tl.int64) * (QUERIES * D) + ((head * GROUP + row) * D)[:, None] + column[None, :]
        tl.store(to, tile.to(queries.dtype.element_ty), mask=(row < GROUP)[:, None] & (column < D)[None, :])
        place = (slot // BLOCK).to(tl.int64) * (SHARED * BLOCK) + head * BLOCK + slot % BLOCK
        store_key_and_value(tile, keys, values, key_scales, value_scales, place, GROUP, D, DP, KIND, LIMIT, SOFT)


def preparing(
    heads: Heads, cache: LayerCache, norms: HeadNorms | None, rotary: RotaryTables | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor | int | None], dict[str, object]]:
    """Arguments and constants of :func:`prepared`, all but its input, of ``dtype``, and its rows."""
    together = cache.rotated()
    arguments: dict[str, Tensor | int | None] = {
        "rotary_rows": None if rotary is None else rotary.rows,
        "cosines": None if rotary is None else rotary.cosines,
        "sines": None if rotary is None else rotary.sines,
        "query_weight": None if norms is None else norms.queries,
        "key_weight": None if norms is None else norms.keys,
        "hadamard": _signs(together, dtype, cache.keys.device) if together else None,
    }
    constants: dict[str, object] = {
        "QUERIES": heads.queries,
        "GROUP": heads.group,
        "HALF": 0 if rotary is None else rotary.cosines.shape[-1],
        "NORM": "none" if norms is None else "whole" if norms.whole else "head",
        "EPS": 0.0 if norms is None else norms.eps,
        "ROUNDS_FIRST": norms is not None and norms.rounds_first,
        "ROTATED": together,
    }
    return arguments, constants


def launch(
    x: Tensor,
    queries: Tensor,
    heads: Heads,
    cache: LayerCache,
    slots: Tensor,
    norms: HeadNorms | None,
    rotary: RotaryTables | None,
) -> Launch:
    """One step's, ready to run."""
    arguments, constants = preparing(heads, cache, norms, rotary, x.dtype)
    # The product that rotates wants 16 rows.
    rows = max(triton.next_power_of_2(heads.group + 2), 16 if cache.rotated() else 1)
    arguments |= {"x": x, "queries": queries, "slots": slots, "x_stride": x.stride(0), **cache.arguments()}
    constants |= {"ROWS": rows, **cache.constants(), **storing(cache)}
    warps = 4 if rows * padded(heads.size) >= 2048 else 1
    return Launch(_rotate_and_store, arguments, constants, (x.shape[0], heads.shared), warps, 1)


def rotate_and_store(
    x: Tensor,
    heads: Heads,
    cache: LayerCache,
    slots: Tensor,
    norms: HeadNorms | None = None,
    rotary: RotaryTables | None = None,
) -> Tensor:
    """Queries ``[tokens, query heads x size]`` for attention; keys and values go to the cache.

    Args:
        x: ``[tokens, (query heads + 2 shared heads) x size]``.
        heads: the layer's.
        cache: the layer's.
        slots: int32, the slot of each token's key: block index times block size plus the offset in the block; -1 for none.
        norms: of queries and keys.
        rotary: rotary positions; None if they are not rotated.
    """
    queries = torch.empty(x.shape[0], heads.queries * heads.size, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        launch(x, queries, heads, cache, slots, norms, rotary).run()
    return queries


_SIGNS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _signs(together: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotation of numbers that lie together, at least 16, without its factor: ones, minus ones and zeros."""
    side = max(16, together)
    if interpreted() and dtype == torch.bfloat16:
        dtype = torch.float32
    if device.type == "meta":
        return torch.empty(side, side, dtype=dtype, device=device)
    key = (together, dtype, device)
    if key not in _SIGNS:
        _SIGNS[key] = (rotation(side, together, device) * together**0.5).round().to(dtype).contiguous()
    return _SIGNS[key]


def reference(
    x: Tensor, heads: Heads, norms: HeadNorms | None, cosines: Tensor | None, sines: Tensor | None, together: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[tokens, heads, size]`` in float64; ``cosines`` and ``sines`` are each token's."""
    widths = [heads.queries, heads.shared, heads.shared]
    queries, keys, values = x.double().unflatten(-1, (-1, heads.size)).split(widths, dim=1)
    if norms is not None:
        queries, keys = (
            _normed(part, weight.double(), norms) for part, weight in ((queries, norms.queries), (keys, norms.keys))
        )
    if cosines is not None and sines is not None:
        queries, keys = (_rotated(part, cosines.double(), sines.double()) for part in (queries, keys))
    if together:
        matrix = rotation(heads.size, together, x.device)
        queries, keys = queries @ matrix, keys @ matrix
    return queries, keys, values


def _normed(part: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    shape = part.shape
    if norms.whole:
        part = part.flatten(1)
    return (part * (part.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * weight).reshape(shape)


def _rotated(part: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.shape[-1]
    first, second, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], -1)


@dataclass(frozen=True)
class StoreCase:
    """A way to call it.

    Attributes:
        norm: ``none``, ``head`` or ``whole``.
        half: how many pairs of each head are rotated.
    """

    heads: Heads
    kind: str
    dtype: torch.dtype
    norm: str = "none"
    rounds_first: bool = False
    half: int = 0
    block: int = 16
    tokens: int = 5

    @property
    def name(self) -> str:
        """The case's name."""
        parts = f"{self.heads.queries}/{self.heads.shared}x{self.heads.size} {self.kind} {self.dtype}"
        first = ", rounds first" if self.rounds_first else ""
        return f"{parts}, norm {self.norm}{first}, {2 * self.half} rotated, blocks of {self.block}".replace(
            "torch.", ""
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that support the cache's dtype."""
        return targets_of(self.kind)

    def norms(self, draw: torch.Generator, device: torch.device | str) -> HeadNorms | None:
        """Random weights."""
        if self.norm == "none":
            return None
        size, whole = self.heads.size, self.norm == "whole"
        widths = [(n if whole else 1) * size for n in (self.heads.queries, self.heads.shared)]
        weights = [(1 + 0.3 * torch.randn(width, generator=draw, device=draw.device)).to(device) for width in widths]
        return HeadNorms(weights[0], weights[1], 1e-6, whole, self.rounds_first)

    def rotary(self, draw: torch.Generator, device: torch.device | str) -> RotaryTables | None:
        """RoPE tables for random positions."""
        if not self.half:
            return None
        angles = 6 * torch.rand(50, self.half, generator=draw, device=draw.device)
        rows = torch.randint(0, 50, (self.tokens,), generator=draw, device=draw.device)
        parts = [part.to(device) for part in (angles.cos().to(self.dtype), angles.sin().to(self.dtype), rows.int())]
        return RotaryTables(*parts)

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """Queries, and the restored cache; codes may be either neighbour of a tie."""
        heads = self.heads
        width = (heads.queries + 2 * heads.shared) * heads.size
        x = torch.randn(self.tokens, width, generator=draw, device=draw.device).to(device, self.dtype)
        norms, rotary = self.norms(draw, device), self.rotary(draw, device)
        blocks = -(-2 * self.tokens // self.block) + 1
        slots = torch.randperm(blocks * self.block, generator=draw, device=draw.device)[: self.tokens].int().to(device)
        slots[-1] = -1
        cache = layer_cache(blocks, heads.shared, self.block, heads.size, self.kind, self.dtype, device)
        each = None if rotary is None else (rotary.cosines[rotary.rows], rotary.sines[rotary.rows])
        queries, keys, values = reference(x, heads, norms, *(each or (None, None)), cache.rotated())
        written = slice(0, self.tokens - 1)
        places = slots[written].long()
        at = (places // self.block, slice(None), places % self.block)

        def compute() -> Tensor:
            found = rotate_and_store(x, heads, cache, slots, norms, rotary)
            parts = [found[written].float().unflatten(-1, (-1, heads.size))]
            for exact, codes, scales in (
                (keys, cache.keys, cache.key_scales),
                (values, cache.values, cache.value_scales),
            ):
                parts.append(_snapped(codes[at], None if scales is None else scales[at], exact[written], self.kind))
            return torch.cat([part.flatten().float() for part in parts])

        expected = torch.cat([part[written].flatten() for part in (queries, keys, values)])
        return PreparedCase(compute, expected, 0)

    def launch(self, target: Target) -> Launch:
        """On ``meta``."""
        heads, meta = self.heads, "meta"
        draw = torch.Generator()
        x = torch.empty(self.tokens, (heads.queries + 2 * heads.shared) * heads.size, dtype=self.dtype, device=meta)
        queries = torch.empty(self.tokens, heads.queries * heads.size, dtype=self.dtype, device=meta)
        cache = layer_cache(8, heads.shared, self.block, heads.size, self.kind, self.dtype, meta)
        slots = torch.empty(self.tokens, dtype=torch.int32, device=meta)
        return launch(x, queries, heads, cache, slots, self.norms(draw, meta), self.rotary(draw, meta))

    def case(self) -> Case:
        """For the checks."""
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]
        return Case(self.name, self.trial, tolerance, targets=self.targets, launch=self.launch)

    def build(self, *, rare: bool = False) -> Build:
        """For the checks."""
        return Build(self.name, self.launch, False, (), targets=self.targets, rare=rare)


def _snapped(codes: Tensor, scales: Tensor | None, exact: Tensor, kind: str) -> Tensor:
    """What codes stand for; the exact number instead where a code is a nearest one."""
    found = restored(codes, scales, kind)
    if scales is None:
        return found
    # The largest number sets the scale, and it must be near to what it should be.
    scale = scales.double().unsqueeze(-1)
    floats = BY_KIND[kind].type == "float"
    step = found.abs() / 8 if floats else scale
    smallest = scale * 2**-9 if floats else scale
    near = (found - exact).abs() <= 0.52 * torch.maximum(step, smallest)
    return torch.where(near, exact, found)


def _cases() -> list[StoreCase]:
    def heads(queries: int, shared: int, size: int) -> Heads:
        return Heads(queries, shared, size, size**-0.5, None, None)

    half, wide = torch.float16, torch.float32
    plain = StoreCase(heads(4, 2, 64), "plain", wide, half=32)
    found = [
        plain,
        replace(plain, norm="head", dtype=half, rounds_first=True),
        replace(plain, norm="whole", dtype=half),
        replace(plain, heads=heads(3, 1, 80), half=10, norm="head", block=24),
        replace(plain, heads=heads(2, 2, 8), half=0, norm="whole", rounds_first=True),
        replace(plain, dtype=torch.bfloat16, half=32),
    ]
    for kind, size in product(QUANTIZED_KINDS, (64, 96)):
        if kind in SELECTABLE_KINDS:
            found.append(replace(plain, kind=kind, heads=heads(6, 2, size), half=size // 2, block=32, norm="head"))
        elif size == 64:
            found.append(replace(plain, kind=kind))
    found.append(replace(plain, kind="int4", heads=heads(4, 4, 8), half=4, dtype=half))
    return found


def _builds() -> list[Build]:
    llama = Heads(32, 8, 128, 128**-0.5, None, None)
    base = StoreCase(llama, "plain", torch.bfloat16, half=64, tokens=512)
    cases = [replace(base, kind=kind) for kind in BY_KIND]
    cases.append(replace(base, norm="head", rounds_first=True))
    cases.append(replace(base, norm="whole", heads=replace(llama, shared=32)))
    cases.append(replace(base, heads=Heads(16, 8, 256, 256**-0.5, None, None), half=128, kind="int4"))
    return [case.build(rare=not BY_KIND[case.kind].packed or case.heads.size != 128) for case in cases]


KERNEL = Kernel("rotate_and_store", [case.case() for case in _cases()], _builds())
