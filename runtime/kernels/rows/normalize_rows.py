"""The operations between a decoder's linears in one pass: norm, residual addition, norm, rounding to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, poisoned
from ..base.launch import Launch, interpreted
from ..base.overlap import wait_and_launch
from ..base.targets import Target
from .quantize_rows import LARGEST, NAMES, TARGETS_OF, rounded, scale_of
from .quantize_rows import reference as codes_and_scales

_BLOCK = 128
WIDEST = 16384  # what 16 warps hold in their registers, with all that is added and multiplied


@dataclass(frozen=True)
class Norm:
    """A norm of rows.

    Attributes:
        kind: ``rms``, or ``layer`` for one that also subtracts the mean.
        weight: for each column; None for ones.
        bias: for each column; None for zeros.
        eps: added to the mean square.
        rounds_first: whether quotient and weight are rounded to the inputs' type before they are multiplied.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rounds_first: bool


_ABSENT = Norm("none", None, None, 0.0, False)


@triton.jit
def _as_stored(values, TYPE: tl.constexpr, SOFT: tl.constexpr):
    """float32 as it is read back from memory of another type.

    ``SOFT`` rounds by arithmetic: Triton's interpreter cuts bits off where devices round.
    """
    if SOFT and TYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return bits.to(tl.float32, bitcast=True)
    else:
        return values.to(TYPE).to(tl.float32)


@triton.jit
def _loaded(parameter, columns, inside, EARLY: tl.constexpr):
    """A parameter's values before they are needed; a zero that nobody reads if there is no such, or no room for it."""
    if EARLY and parameter is not None:
        return tl.load(parameter + columns, mask=inside, other=0.0)
    else:
        return 0.0


@triton.jit
def _normed(
    values,
    weight,
    bias,
    early_weight,
    early_bias,
    columns,
    inside,
    K,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    EARLY: tl.constexpr,
    SOFT: tl.constexpr,
):
    """A row's norm; its values are zero where it has ended."""
    if KIND == "layer":
        # From centred values: a difference of large squares would leave nothing of a small variance.
        values = tl.where(inside, values - tl.sum(values, 0) / K, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / K + EPS)
    if ROUNDS_FIRST:
        values = _as_stored(values, TYPE, SOFT)
    if weight is not None:
        scale = early_weight if EARLY else _loaded(weight, columns, inside, True)
        scale = scale.to(tl.float32)
        if ROUNDS_FIRST:
            scale = _as_stored(scale, TYPE, SOFT)
        values *= scale
    if bias is not None:
        offset = early_bias if EARLY else _loaded(bias, columns, inside, True)
        values += offset.to(tl.float32)
    return _as_stored(values, TYPE, SOFT)


@triton.jit
def _normalize_rows(
    x,
    residual,
    before_weight,
    before_bias,
    weight,
    bias,
    sums,
    out,
    scales,
    K,
    x_stride,
    residual_stride,
    sums_stride,
    blocks,
    BEFORE: tl.constexpr,
    BEFORE_EPS: tl.constexpr,
    BEFORE_ROUNDS_FIRST: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    SOFT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    TYPE: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    added = None
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    first_weight = _loaded(before_weight, columns, inside, EARLY)
    first_bias = _loaded(before_bias, columns, inside, EARLY)
    last_weight = _loaded(weight, columns, inside, EARLY)
    last_bias = _loaded(bias, columns, inside, EARLY)

    if BEFORE != "none":
        values = _normed(
            values,
            before_weight,
            before_bias,
            first_weight,
            first_bias,
            columns,
            inside,
            K,
            BEFORE,
            BEFORE_EPS,
            BEFORE_ROUNDS_FIRST,
            TYPE,
            EARLY,
            SOFT,
        )
    if residual is not None:
        values = _as_stored(values + added.to(tl.float32), TYPE, SOFT)
    if sums is not None:
        tl.store(sums + row * sums_stride + columns, values.to(TYPE), mask=inside)
    if NORM != "none":
        values = _normed(
            values, weight, bias, last_weight, last_bias, columns, inside, K, NORM, EPS, ROUNDS_FIRST, TYPE, EARLY, SOFT
        )
    if out is not None:
        CODE: tl.constexpr = out.dtype.element_ty
        if scales is None:
            tl.store(out + row * K + columns, values.to(CODE), mask=inside)
        elif BY_BLOCK:
            by_block = tl.reshape(values, [BLOCK // 128, 128])
            scale = scale_of(tl.abs(by_block), 1, LIMIT)
            found = rounded(by_block, scale[:, None], CODE, LIMIT, SOFT)
            tl.store(out + row * K + columns, tl.reshape(found, [BLOCK]), mask=inside)
            block = tl.arange(0, BLOCK // 128)
            tl.store(scales + row * blocks + block, scale, mask=block < blocks)
        else:
            scale = scale_of(tl.abs(values), 0, LIMIT)
            tl.store(scales + row, scale)
            tl.store(out + row * K + columns, rounded(values, scale, CODE, LIMIT, SOFT), mask=inside)


def launch_of(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    before: Norm | None = None,
    norm: Norm | None = None,
    sums: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Launch:
    """One launch, ready to run.

    Args:
        x: ``[rows, columns]``; as in :func:`normalize_rows`.
        residual: as there.
        before: as there.
        norm: as there.
        sums: where to; None if they are not wanted.
        out: where to, each row after the one before; None if only sums are wanted.
        scales: where to, if ``out`` has codes: ``[rows]``, or ``[rows, blocks]``.

    Raises:
        ValueError: rows are too long.
    """
    columns = x.shape[1]
    if columns > WIDEST:
        raise ValueError(f"rows of {columns} elements cannot be normed; a program holds at most {WIDEST}")
    first, last = before or _ABSENT, norm or _ABSENT
    by_block = scales is not None and scales.dim() == 2
    block = 1 << max(_BLOCK - 1, columns - 1).bit_length()
    arguments: dict[str, Tensor | int | None] = {
        "x": x,
        "residual": residual,
        "before_weight": first.weight,
        "before_bias": first.bias,
        "weight": last.weight,
        "bias": last.bias,
        "sums": sums,
        "out": out,
        "scales": scales,
        "K": columns,
        "x_stride": x.stride(0),
        "residual_stride": None if residual is None else residual.stride(0),
        "sums_stride": None if sums is None else sums.stride(0),
        "blocks": scales.shape[1] if scales is not None and by_block else None,
    }
    constants: dict[str, Any] = {
        "BEFORE": first.kind,
        "BEFORE_EPS": first.eps,
        "BEFORE_ROUNDS_FIRST": first.rounds_first,
        "NORM": last.kind,
        "EPS": last.eps,
        "ROUNDS_FIRST": last.rounds_first,
        "BY_BLOCK": by_block,
        "LIMIT": 0.0 if out is None or scales is None else LARGEST[out.dtype],
        "BLOCK": block,
        # No load passes a sum's barrier, and a step of few rows would wait for each; but longer rows fill the registers.
        "EARLY": block <= 8192,
        "SOFT": interpreted(),
    }
    # 16 bytes a load for each of 64 lanes, too; AMD's programs have 16 warps at most.
    warps = min(16, max(1, block // 512))
    return Launch(_normalize_rows, arguments, constants, (x.shape[0],), warps, 1)


def normalize_rows(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    before: Norm | None = None,
    norm: Norm | None = None,
    sums: Tensor | None = None,
    code: torch.dtype | None = None,
    by_block: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Norm rows, add the residual, norm the sums, and round those to codes; each of these is optional.

    The first norm's outputs and the sums are rounded to the dtype of ``x`` before they are used further.

    Args:
        x: ``[rows, columns]`` of float16, bfloat16 or float32, with contiguous rows.
        residual: of the same dtype; added to ``x``, or to the outputs of ``before``.
        before: a norm of ``x``.
        norm: a norm of the sums.
        sums: their output, possibly ``residual`` itself; allocated by default.
        code: int8 or e4m3, to output codes.
        by_block: a scale for each 128 columns instead of each row.

    Returns:
        The sums, which are ``x`` itself without ``residual`` and ``before``; their norm, which is the sums themselves
        without ``norm`` and ``code``; and the float32 scales of codes, ``[rows]`` or ``[rows, blocks]``.

    Raises:
        ValueError: rows are too long.
    """
    rows, columns = x.shape
    if residual is None and before is None:
        sums, stored = x, None
    else:
        sums = stored = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if sums is None else sums
    scales = None
    if code is not None:
        shape = (rows, -(-columns // _BLOCK)) if by_block else (rows,)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    out = None if norm is None and code is None else torch.empty(rows, columns, dtype=code or x.dtype, device=x.device)
    if rows and (stored is not None or out is not None):
        launch_of(x, residual=residual, before=before, norm=norm, sums=stored, out=out, scales=scales).run()
    return sums, sums if out is None else out, scales


def reference(
    x: Tensor, residual: Tensor | None = None, before: Norm | None = None, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Sums and their norm in float64, rounded to the type of ``x`` where that is stored between the parts."""
    sums = x.double() if before is None else _reference_of_one(x.double(), before, x.dtype)
    if residual is not None:
        sums = (sums + residual.double()).to(x.dtype).double()
    return sums, sums if norm is None else _reference_of_one(sums, norm, x.dtype)


def _reference_of_one(values: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    values = values / (values.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    weight = torch.ones_like(values[0]) if norm.weight is None else norm.weight
    if norm.rounds_first:
        values, weight = values.to(dtype).double(), weight.to(dtype)
    values = values * weight.double()
    return (values if norm.bias is None else values + norm.bias.double()).to(dtype).double()


@dataclass(frozen=True)
class _Form:
    """How a model's norms are written."""

    kind: str
    eps: float
    weight: bool = True
    bias: bool = False
    rounds_first: bool = False
    wide: bool = True  # parameters of float32, else of the inputs' type

    def norm(self, columns: int, dtype: torch.dtype, draw: torch.Generator, device: torch.device) -> Norm:
        kept = torch.float32 if self.wide else dtype
        weight, bias = torch.randn(2, columns, generator=draw, device=draw.device).to(kept).to(device)
        given = (weight + 1 if self.weight else None, bias if self.bias else None)
        return Norm(self.kind, *given, self.eps, self.rounds_first)


_FORMS = {
    "llama": _Form("rms", 1e-5, rounds_first=True),
    "gemma": _Form("rms", 1e-6),
    "gpt2": _Form("layer", 1e-5, bias=True, wide=False),
    "cohere": _Form("layer", 1e-5),
    "olmo": _Form("layer", 1e-5, weight=False),
}
# Single precision has no rounding in between that could turn out otherwise; codes are compared with what they stand for.
_TOLERANCE = {torch.float32: 5e-6, **TOLERANCE}
_CODE_TOLERANCE = {torch.int8: 1.5e-2, torch.float8_e4m3fn: 4e-2, torch.float8_e4m3fnuz: 4e-2}


@dataclass(frozen=True)
class NormCase:
    """Norms and what is done besides, from which inputs are drawn."""

    rows: int
    columns: int
    dtype: torch.dtype
    norm: str = ""
    before: str = ""
    residual: bool = False
    code: torch.dtype | None = None
    by_block: bool = False
    in_place: bool = False
    offset: float = 0.0  # of the inputs from zero

    @property
    def name(self) -> str:
        """Size, type, and what is done in its order."""
        options = [f"{self.before} before"] if self.before else []
        options += ["in place" if self.in_place else "residual"] if self.residual else []
        options += [self.norm] if self.norm else []
        options += [f"{NAMES[self.code]} {'by block' if self.by_block else 'by row'}"] if self.code else []
        options += [f"{self.offset:g} away from zero"] if self.offset else []
        return " ".join([f"{self.rows}x{self.columns}", str(self.dtype).removeprefix("torch."), *options])

    @property
    def exact(self) -> bool:
        """Whether only one rounding stands between float64 and codes or sums."""
        return not (self.norm or self.before)

    def inputs(self, device: torch.device, draw: torch.Generator) -> dict[str, Any]:
        """What both :func:`launch_of` and :func:`reference` take; rows of ``x`` do not follow one another at once."""

        def rows_of(columns: int) -> Tensor:
            drawn = torch.randn(self.rows, columns, generator=draw, device=draw.device) + self.offset
            return drawn.to(self.dtype).to(device)

        found: dict[str, Any] = {"x": rows_of(self.columns + 16)[:, : self.columns]}
        found["residual"] = rows_of(self.columns) if self.residual else None
        for name, form in (("before", self.before), ("norm", self.norm)):
            found[name] = _FORMS[form].norm(self.columns, self.dtype, draw, device) if form else None
        return found

    def outputs(self, device: torch.device) -> dict[str, Any]:
        """What the launch of these inputs writes, none of it a number yet; but int8 has nothing else."""
        found: dict[str, Any] = {"sums": None, "out": None, "scales": None}
        if self.residual or self.before:
            found["sums"] = poisoned(self.rows, self.columns, self.dtype, device)
        if self.norm or self.code:
            found["out"] = poisoned(self.rows, self.columns, self.dtype, device).to(self.code or self.dtype)
        if self.code:
            scales = poisoned(self.rows, -(-self.columns // _BLOCK), torch.float32, device)
            found["scales"] = scales if self.by_block else scales[:, 0].contiguous()
        return found

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """Sums, and their norm or what its codes stand for."""
        given = self.inputs(device, draw)
        sums, out = reference(**given)
        if self.exact and self.code:
            out = self._restored(*codes_and_scales(out.to(self.dtype), self.code, by_block=self.by_block))

        def compute() -> Tensor:
            if self.in_place:
                sums = given["residual"].clone()
                there = {**given, "residual": sums, "sums": sums}
                _, out, scales = normalize_rows(**there, code=self.code, by_block=self.by_block)
            else:
                to = self.outputs(device)
                launch_of(**given, **to).run()
                sums = given["x"] if to["sums"] is None else to["sums"]
                out, scales = sums if to["out"] is None else to["out"], to["scales"]
            return self._compared(sums, out.double() if scales is None else self._restored(out, scales))

        return PreparedCase(compute, self._compared(sums, out), given["x"].nbytes)

    def _compared(self, sums: Tensor, out: Tensor) -> Tensor:
        """Both as one, of one size: beside sums far from zero nobody would see what is wrong with their norm."""
        return torch.cat([sums.double() / (1 + self.offset), out.double()])

    def _restored(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.by_block:
            return codes.double() * scales.double().repeat_interleave(_BLOCK, 1)[:, : self.columns]
        return codes.double() * scales.double()[:, None]

    def case(self) -> Case:
        """For the interpreter, or a GPU if it is large."""
        tolerance = _TOLERANCE[self.dtype] * (1 + self.offset)
        if self.code:
            tolerance = _CODE_TOLERANCE[self.code]
        targets = TARGETS_OF[self.code] if self.code else ()
        large = self.rows * self.columns > 1 << 20
        return Case(self.name, self.trial, 0.0 if self.exact else tolerance, large, targets, self.launch)

    def launch(self, target: Target) -> Launch:
        """On ``meta``, to be compiled."""
        meta = torch.device("meta")
        return launch_of(**self.inputs(meta, torch.Generator().manual_seed(0)), **self.outputs(meta))

    def build(self) -> Build:
        """For the targets that have its codes."""
        targets = TARGETS_OF[self.code] if self.code else ()
        rare = self.by_block or self.columns != 4096 or self.code not in (None, torch.int8)
        return Build(self.name, self.launch, matrix=False, streamed=("x",), targets=targets, rare=rare)


_F, _B, _W = torch.float16, torch.bfloat16, torch.float32
_KINDS = [(code, by_block) for code in LARGEST for by_block in (False, True)]
_SIZES = ((1, 1), (3, 96), (2, 100), (1, 576), (3, 640))
_PARTS = [(norm, before, residual) for norm in ("", *_FORMS) for before in ("", *_FORMS) for residual in (False, True)]
_SMALL = [
    # Sizes and types take turns, five and seven, so that each meets each of a part's two or six.
    *(
        NormCase(*_SIZES[i % 5], (_F, _B, _W, _F, _B, _W, _B)[i % 7], *parts)
        for i, parts in enumerate(part for part in _PARTS if any(part))
    ),
    *(NormCase(*size, _F, "llama", residual=True, in_place=True) for size in _SIZES),
    *(NormCase(2, 1300, dtype, "llama", "gemma", residual=True, in_place=True) for dtype in (_F, _B, _W)),
    NormCase(1, 9000, _B, "gpt2", "gemma", residual=True),
    *(NormCase(3, 576, _W, form, residual=True, offset=1000.0) for form in ("gpt2", "olmo")),
    *(
        NormCase(*size, dtype, norm, before, residual, *kind)
        for kind in _KINDS
        for (norm, before, residual), size, dtype in (
            (("", "", False), (2, 576), _B),
            (("", "", True), (3, 640), _F),
            (("llama", "", True), (3, 640), _B),
            (("gemma", "gemma", True), (2, 100), _F),
            (("gpt2", "", True), (1, 576), _W),
        )
    ),
    NormCase(2, 300, _B, "llama", residual=True, code=torch.int8, in_place=True),
]
_LARGE = [
    *(NormCase(512, 4096, _B, "llama", residual=True, code=code, by_block=blocks) for code, blocks in _KINDS),
    NormCase(512, 4096, _B, "llama", residual=True, in_place=True),
    NormCase(512, 3584, _B, "gemma", "gemma", residual=True),
    NormCase(2048, 768, _F, "gpt2", residual=True),
    NormCase(128, 16384, _B, "llama", residual=True),
    NormCase(128, 16384, _W, "gpt2", "gpt2", residual=True),
]
_BUILDS = [
    NormCase(1, 4096, _B, "llama", residual=True),
    *(NormCase(1, 4096, _B, "llama", residual=True, code=code, by_block=blocks) for code, blocks in _KINDS),
    NormCase(1, 3584, _B, "gemma", "gemma", residual=True),
    NormCase(1, 768, _F, "gpt2", residual=True),
    NormCase(1, 16384, _B, "llama", residual=True),
    NormCase(1, 16384, _B, "gpt2", "gpt2", residual=True),
]
KERNEL = Kernel("normalize_rows", [case.case() for case in [*_SMALL, *_LARGE]], [case.build() for case in _BUILDS])
