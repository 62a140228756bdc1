"""Losses of rows of logits with their gradients, in one launch that reads each row two or three times and stores nothing else.

What distillation and training minimise: how far a student's next-token distribution is from its teacher's, from what was stored of
one, or from the text. torch's operators would write and read again every step of the way; rows of a chunk of logits stay in
the GPU's cache between the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, poisoned
from ..base.launch import Launch
from ..base.overlap import wait_and_launch
from ..base.targets import Target

KINDS = ("forward_kl", "reverse_kl", "jsd", "total_variation", "cross_entropy", "top_kl")
_BLOCK = 4096
_LEAST = 1e-30


@triton.jit
def _load(logits, at, inside, factor):
    # Low, but no infinity: a difference of two of those is no number.
    return tl.where(inside, tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * factor, -1e30)


@triton.jit
def _normalizer(logits, V, factor, BLOCK: tl.constexpr):
    """The logarithm of the sum of exponentials of a row."""
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = _load(logits, at, at < V, factor)
        higher = tl.maximum(top, values)
        total = total * tl.exp(top - higher) + tl.exp(values - higher)
        top = higher
    highest = tl.max(top, 0)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))


@triton.jit
def _mixture(ours, theirs, BETA: tl.constexpr):
    """The logarithm of a share of the teacher's probabilities and the rest of the student's."""
    higher = tl.maximum(ours, theirs)
    return higher + tl.log(BETA * tl.exp(theirs - higher) + (1.0 - BETA) * tl.exp(ours - higher))


@triton.jit
def _cross_entropy(student, target, slopes, V, factor, ours_all, BLOCK: tl.constexpr):
    """The loss of one row where ``target`` is the next token, none if that is negative. Stores the gradient."""
    out = slopes.dtype.element_ty
    known = target >= 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < V
        q = tl.exp(_load(student, at, inside, factor) - ours_all)
        slope = tl.where(known, q - tl.where(at == target, 1.0, 0.0), 0.0)
        tl.store(slopes + at, slope.to(out), mask=inside)
    at_target = _load(student, tl.where(known, target, 0), known, factor)
    return tl.where(known, ours_all - at_target, 0.0)


@triton.jit
def _top_kl(
    student,
    places,
    kept,
    slopes,
    V,
    K,
    factor,
    ours_all,
    TEMPERATURE: tl.constexpr,
    LEAST: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence of one row from the tokens that were kept of a teacher, all others being one more. Stores the gradient."""
    out = slopes.dtype.element_ty
    which = tl.arange(0, KEPT)
    there = which < K
    place = tl.load(places + which, mask=there, other=0)
    logs = tl.load(kept + which, mask=there, other=-1e30).to(tl.float32)
    p = tl.exp(logs)
    # Which tokens are among those that were kept is marked where their gradients will stand.
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(slopes + at, tl.zeros([BLOCK], tl.float32).to(out), mask=at < V)
    tl.debug_barrier()
    tl.store(slopes + place, tl.full([KEPT], 1.0, tl.float32).to(out), mask=there)
    tl.debug_barrier()
    rest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < V
        marked = tl.load(slopes + at, mask=inside, other=1.0, cache_modifier=".cg").to(tl.float32) > 0.0
        rest += tl.where(marked, 0.0, tl.exp(_load(student, at, inside, factor) - ours_all))
    q_rest = tl.maximum(tl.sum(rest, 0), LEAST)
    p_kept = tl.sum(p, 0)
    p_rest = tl.where(K == V, 0.0, tl.maximum(1.0 - p_kept, 0.0))
    whole = p_kept + p_rest
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < V
        q = tl.exp(_load(student, at, inside, factor) - ours_all)
        tl.store(slopes + at, (TEMPERATURE * q * (whole - p_rest / q_rest)).to(out), mask=inside)
    tl.debug_barrier()
    ours = _load(student, place, there, factor) - ours_all
    tl.store(slopes + place, (TEMPERATURE * (tl.exp(ours) * whole - p)).to(out), mask=there)
    apart = tl.sum(tl.where(there, p * (logs - ours), 0.0), 0)
    return apart + tl.where(p_rest > 0.0, p_rest * (tl.log(tl.maximum(p_rest, LEAST)) - tl.log(q_rest)), 0.0)


@triton.jit
def _divergence(
    student,
    teacher,
    slopes,
    V,
    factor,
    ours_all,
    KIND: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence of one row from all of a teacher's. Stores the gradient."""
    out = slopes.dtype.element_ty
    theirs_all = _normalizer(teacher, V, factor, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < V
        ours = tl.where(inside, _load(student, at, inside, factor) - ours_all, 0.0)
        theirs = tl.where(inside, _load(teacher, at, inside, factor) - theirs_all, 0.0)
        q = tl.where(inside, tl.exp(ours), 0.0)
        p = tl.where(inside, tl.exp(theirs), 0.0)
        if KIND == "forward_kl":
            value += p * (theirs - ours)
            tl.store(slopes + at, (TEMPERATURE * (q - p)).to(out), mask=inside)
        elif KIND == "reverse_kl":
            value += q * (ours - theirs)
        elif KIND == "jsd":
            mixed = _mixture(ours, theirs, BETA)
            value += BETA * p * (theirs - mixed) + (1.0 - BETA) * q * (ours - mixed)
            mean += q * (ours - mixed)
        else:
            value += tl.abs(q - p) * 0.5
            mean += q * (tl.where(q > p, 1.0, 0.0) - tl.where(q < p, 1.0, 0.0))
    total = tl.sum(value, 0)
    if KIND != "forward_kl":
        middle = total if KIND == "reverse_kl" else tl.sum(mean, 0)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < V
            ours = tl.where(inside, _load(student, at, inside, factor) - ours_all, 0.0)
            theirs = tl.where(inside, _load(teacher, at, inside, factor) - theirs_all, 0.0)
            q = tl.exp(ours)
            if KIND == "reverse_kl":
                slope = q * (ours - theirs - middle)
            elif KIND == "jsd":
                slope = (1.0 - BETA) * q * (ours - _mixture(ours, theirs, BETA) - middle)
            else:
                p = tl.exp(theirs)
                slope = 0.5 * q * (tl.where(q > p, 1.0, 0.0) - tl.where(q < p, 1.0, 0.0) - middle)
            tl.store(slopes + at, (TEMPERATURE * slope).to(out), mask=inside)
    return total


@triton.jit
def _loss_rows(
    student,
    teacher,
    targets,
    places,
    kept,
    values,
    slopes,
    V,
    K,
    student_stride,
    teacher_stride,
    KIND: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BETA: tl.constexpr,
    LEAST: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    slopes += row * V
    factor = 1.0 / TEMPERATURE
    ours_all = _normalizer(student, V, factor, BLOCK)
    if KIND == "cross_entropy":
        value = _cross_entropy(student, tl.load(targets + row), slopes, V, factor, ours_all, BLOCK)
    elif KIND == "top_kl":
        value = TEMPERATURE * TEMPERATURE * _top_kl(
            student, places + row * K, kept + row * K, slopes, V, K, factor, ours_all, TEMPERATURE, LEAST, KEPT, BLOCK
        )  # fmt: skip
    else:
        value = TEMPERATURE * TEMPERATURE * _divergence(
            student, teacher + row * teacher_stride, slopes, V, factor, ours_all, KIND, TEMPERATURE, BETA, BLOCK
        )  # fmt: skip
    tl.store(values + row, value)


@dataclass(frozen=True)
class Compared:
    """The targets of a student's logits; each kind of loss needs some of them.

    Attributes:
        teacher: logits ``[rows, vocabulary]``, of the divergences.
        targets: int64 ``[rows]``, of ``cross_entropy``; negative where there is none.
        places, kept: int64 and float32 ``[rows, k]``, of ``top_kl``: the teacher's most likely tokens and their
            log-probabilities at the temperature.
    """

    teacher: Tensor | None = None
    targets: Tensor | None = None
    places: Tensor | None = None
    kept: Tensor | None = None


def launch(
    kind: str, student: Tensor, compared: Compared, values: Tensor, slopes: Tensor, temperature: float, beta: float
) -> Launch:
    """One pass, ready to run."""
    rows, vocabulary = student.shape
    needed = {"cross_entropy": ("targets",), "top_kl": ("places", "kept")}.get(kind, ("teacher",))
    given = {name: getattr(compared, name) for name in ("teacher", "targets", "places", "kept")}
    missing = [name for name in needed if given[name] is None]
    if kind not in KINDS or missing:
        raise ValueError(f"{kind} needs {', '.join(missing) or f'to be one of {KINDS}'}")
    teacher, places = compared.teacher, compared.places
    if student.stride(1) != 1 or (teacher is not None and (teacher.shape != student.shape or teacher.stride(1) != 1)):
        raise ValueError("both logits must be [rows, vocabulary] with contiguous rows")
    count = 1 if places is None else places.shape[1]
    arguments: dict[str, Tensor | int | None] = {
        "student": student,
        **{name: (each if name in needed else None) for name, each in given.items()},
        "values": values,
        "slopes": slopes,
        "V": vocabulary,
        "K": count,
        "student_stride": student.stride(0),
        "teacher_stride": 0 if teacher is None else teacher.stride(0),
    }
    # Both distributions and what lies between them: of 8 warps' numbers sm_100's compiler leaves some in memory.
    block, warps = (_BLOCK // 2, 4) if kind in ("jsd", "total_variation") else (_BLOCK, 8)
    constants = {
        "KIND": kind,
        "TEMPERATURE": temperature,
        "BETA": beta,
        "LEAST": _LEAST,
        "KEPT": triton.next_power_of_2(count),
        "BLOCK": min(block, triton.next_power_of_2(vocabulary)),
    }
    return Launch(_loss_rows, arguments, constants, (rows,), warps, 1)


def loss_rows(
    kind: str, student: Tensor, compared: Compared, temperature: float = 1.0, beta: float = 0.5
) -> tuple[Tensor, Tensor]:
    """A loss of each row of logits, and its gradient; as :mod:`smelt.distill.losses` defines them.

    Args:
        kind: one of :data:`KINDS`.
        student: float32 or 16-bit logits ``[rows, vocabulary]``.
        compared: the targets.
        temperature: of both distributions.
        beta: the teacher's share of ``jsd``'s mixture.

    Returns:
        Values in float32 ``[rows]``, and gradients in the logits' type.
    """
    values = torch.empty(len(student), dtype=torch.float32, device=student.device)
    slopes = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    if len(student):
        launch(kind, student, compared, values, slopes, temperature, beta).run()
    return values, slopes


@dataclass(frozen=True)
class _LossCase:
    kind: str
    rows: int
    vocabulary: int
    dtype: torch.dtype
    temperature: float = 1.0
    beta: float = 0.5
    padded: int = 0  # padding elements between rows
    kept: int = 16

    @property
    def name(self) -> str:
        options = [f"at {self.temperature:g}"] if self.temperature != 1 else []
        options += [f"beta {self.beta:g}"] if self.kind == "jsd" else []
        options += [f"{self.kept} kept"] if self.kind == "top_kl" else []
        options += [f"{self.padded} apart"] if self.padded else []
        return " ".join([f"{self.kind} {self.rows}x{self.vocabulary} {self.dtype}", *options]).replace("torch.", "")

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """The reference is torch's own derivative of the formula, in float64."""
        logits = []
        for _ in range(2):
            each = poisoned(self.rows, self.vocabulary + self.padded, self.dtype, device)[:, : self.vocabulary]
            logits.append(each.copy_(3 * torch.randn(each.shape, generator=draw, device=draw.device)))
        student, teacher = logits
        targets = torch.randint(-1, self.vocabulary, (self.rows,), generator=draw, device=draw.device).to(device)
        kept, places = torch.log_softmax(teacher.double() / self.temperature, -1).topk(self.kept, dim=-1)
        compared = Compared(teacher, targets, places, kept.float())
        leaf = student.double().requires_grad_()
        expected = _value(self.kind, leaf, compared, self.temperature, self.beta)
        (slope,) = torch.autograd.grad(expected.sum(), leaf)
        size, scale = expected.detach().abs().mean().clamp_min(1e-9), slope.square().mean().sqrt()

        def compute() -> Tensor:
            values, slopes = loss_rows(self.kind, student, compared, self.temperature, self.beta)
            return torch.cat(((values / size)[:, None], slopes / scale), 1)

        return PreparedCase(compute, torch.cat(((expected.detach() / size)[:, None], slope / scale), 1), student.nbytes)

    def launch(self, target: Target) -> Launch:
        """On ``meta``, for compilation."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        shape, few = (self.rows, self.vocabulary), (self.rows, self.kept)
        compared = Compared(
            empty(*shape, dtype=self.dtype),
            empty(self.rows, dtype=torch.int64),
            empty(*few, dtype=torch.int64),
            empty(*few, dtype=torch.float32),
        )
        values, slopes = empty(self.rows, dtype=torch.float32), empty(*shape, dtype=self.dtype)
        student = empty(*shape, dtype=self.dtype)
        return launch(self.kind, student, compared, values, slopes, self.temperature, self.beta)

    def case(self, large: bool = False) -> Case:
        tolerance = 1e-4 if self.dtype == torch.float32 else TOLERANCE[self.dtype]
        return Case(self.name, self.trial, tolerance, large, launch=self.launch)

    def build(self, rare: bool = False) -> Build:
        return Build(self.name, self.launch, matrix=False, streamed=("student",), rare=rare)


def _value(kind: str, student: Tensor, compared: Compared, temperature: float, beta: float) -> Tensor:
    """The formulas, repeated for the test cases."""
    ours = torch.log_softmax(student / temperature, -1)
    q = ours.exp()
    if kind == "cross_entropy":
        assert compared.targets is not None
        return torch.nn.functional.cross_entropy(student, compared.targets, ignore_index=-1, reduction="none")
    if kind == "top_kl":
        assert compared.places is not None
        assert compared.kept is not None
        logs = compared.kept.double()
        p, mine = logs.exp(), ours.gather(-1, compared.places)
        p_rest, q_rest = 1 - p.sum(-1), 1 - mine.exp().sum(-1)
        return ((p * (logs - mine)).sum(-1) + p_rest * (p_rest / q_rest).log()) * temperature**2
    assert compared.teacher is not None
    theirs = torch.log_softmax(compared.teacher.double() / temperature, -1)
    p = theirs.exp()
    mixed = (beta * p + (1 - beta) * q).log()
    found = {
        "forward_kl": lambda: p * (theirs - ours),
        "reverse_kl": lambda: q * (ours - theirs),
        "jsd": lambda: beta * p * (theirs - mixed) + (1 - beta) * q * (ours - mixed),
        "total_variation": lambda: (q - p).abs() / 2,
    }[kind]()
    return found.sum(-1) * temperature**2


_F, _B, _W = torch.float16, torch.bfloat16, torch.float32
_SMALL = [
    _LossCase("forward_kl", 3, 5000, _W, padded=24),
    _LossCase("forward_kl", 2, 300, _B, temperature=2.0),
    _LossCase("reverse_kl", 3, 5000, _W, temperature=0.5),
    _LossCase("jsd", 3, 4096, _W, beta=0.1, padded=3),
    _LossCase("jsd", 2, 1000, _B, temperature=2.0, beta=0.9),
    _LossCase("total_variation", 3, 5000, _W),
    _LossCase("cross_entropy", 5, 5000, _W),
    _LossCase("cross_entropy", 5, 257, _F),
    _LossCase("top_kl", 3, 5000, _W, kept=16, temperature=1.5),
    _LossCase("top_kl", 2, 300, _B, kept=5),
]
_LARGE = [_LossCase(kind, 32, 128256, _B, kept=64) for kind in KINDS]
_BUILDS = [_LARGE[0].build(), *(each.build(rare=True) for each in _LARGE[1:])]
KERNEL = Kernel("loss_rows", [*(case.case() for case in _SMALL), *(case.case(large=True) for case in _LARGE)], _BUILDS)
