"""A quantized checkpoint as exporters see it: every linear's codes and scales, and the unquantized tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...quant.stored.codes import Codes
from ...runtime.decoder.architectures import spec_of
from ...runtime.weights.checkpoint import Checkpoint
from ...runtime.weights.matrix import Matrix
from ...system.errors import Problem, RuntimeProblem
from ...system.progress import Progress

# Local names of the tensors that store a quantized weight; all others, such as its bias, are copied unchanged.
_PARTS = {
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_global_scale",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
}
_MARKS = ("weight_scale", "qweight")


@dataclass(frozen=True)
class StoredLinear:
    """How one linear's weight is stored.

    Attributes:
        name: the linear's name in the checkpoint.
        rows, columns: its shape.
        label: the number format, for messages.
        bits: of each code.
        coded: whether it is stored as integer codes with scales; otherwise only its values are known.
        group: columns that share a scale; -1 if a row has one scale.
        symmetric: whether all zero-points are in the middle of the code range.
        lowest_zero, high_zero: whether any zero-point is the lowest code, or above the highest.
        reordered: whether its groups are not contiguous columns.
        rounds_inputs: whether its activations are quantized.
        scales: number of scales.
        odd_scales: how many of them are not exact in float16.
        largest_move: the largest change of one in float16, relative to the largest scale.
    """

    name: str
    rows: int
    columns: int
    label: str
    bits: int
    coded: bool
    group: int
    symmetric: bool
    lowest_zero: bool
    high_zero: bool
    reordered: bool
    rounds_inputs: bool
    scales: int
    odd_scales: int
    largest_move: float

    @classmethod
    def of(cls, name: str, matrix: Matrix) -> StoredLinear:
        """The facts of one weight."""
        rows, columns = matrix.shape
        scale, zero = matrix.scale, matrix.zero
        odd, move = (0, 0.0) if scale is None else _moved_by_float16(scale)
        return cls(
            name,
            rows,
            columns,
            matrix.format,
            matrix.bits,
            coded=scale is not None and matrix.floats is None,
            group=-1 if matrix.group == columns else matrix.group,
            symmetric=zero is None or not bool(zero.any()),
            lowest_zero=zero is not None and int(zero.min()) == -(2 ** (matrix.bits - 1)),
            high_zero=zero is not None and int(zero.max()) >= 2 ** (matrix.bits - 1),
            reordered=matrix.order is not None,
            rounds_inputs=matrix.inputs is not None,
            scales=0 if scale is None else scale.numel(),
            odd_scales=odd,
            largest_move=move,
        )


class Source:
    """An opened quantized checkpoint. Every quantized weight is read once to determine how it is stored.

    Args:
        path: the model's directory.
        trust_remote_code: run Python code that comes with it.

    Attributes:
        matrix: reads a quantized weight by its module's name.
        codes: the integer codes of one.
        linears: how each quantized linear is stored.
        table: how the input embedding is stored; None if unquantized.
        carried: the names of all other tensors.

    Raises:
        SmeltError: it cannot be read.
    """

    def __init__(self, path: Path, *, trust_remote_code: bool = False, progress: Progress | None = None) -> None:
        self.path = path
        self.checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
        self.checkpoint.check()
        self.weights = self.checkpoint.weights
        embedding = _embedding(self.checkpoint)

        def read(name: str) -> Matrix:
            return self.checkpoint.matrix(name, "Embedding" if name == embedding else "Linear")

        self.matrix: Callable[[str], Matrix] = lru_cache(maxsize=1)(read)
        self.codes: Callable[[str], Codes] = lru_cache(maxsize=1)(lambda name: self.matrix(name).codes())
        stored = self.weights.names()
        names = sorted({n.rpartition(".")[0] for n in stored if n.rpartition(".")[2] in _MARKS}, key=_by_number)
        show = progress or Progress(False)
        self.linears = {
            name: StoredLinear.of(name, self.matrix(name)) for name in show.track(names, "reading layers", len(names))
        }
        self.table = self.linears.pop(embedding, None)
        self.carried = [n for n in stored if n.rpartition(".")[0] not in names or n.rpartition(".")[2] not in _PARTS]

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        return self.checkpoint.dtype

    def plain_matrices(self) -> list[str]:
        """Names of the weights ``[rows, columns]`` that are not quantized."""
        found = [name for name in self.carried if name.endswith(".weight")]
        return [name.removesuffix(".weight") for name in found if len(self.weights.info(name).shape) == 2]


def in_block(name: str) -> bool:
    """Whether a module is inside one of the model's numbered blocks."""
    return any(part.isdigit() for part in name.split("."))


def for_each(found: list[tuple[str, str]]) -> list[Problem]:
    """Pairs of a linear's name and its problem, as one problem per distinct sentence."""
    by_sentence: dict[str, list[str]] = {}
    for name, sentence in found:
        by_sentence.setdefault(sentence, []).append(name)
    return [
        Problem(f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}", sentence)
        for sentence, names in by_sentence.items()
    ]


def scales_in_float16(source: Source) -> list[str]:
    """What storing scales in float16 changes, as a sentence; empty if all are exact."""
    odd = sum(linear.odd_scales for linear in source.linears.values())
    if not odd:
        return []
    total = sum(linear.scales for linear in source.linears.values())
    move = max(linear.largest_move for linear in source.linears.values())
    return [
        f"{odd:,} of {total:,} scales are not exact in float16, which the format uses; each was rounded to the nearest,"
        f" by at most {move:.1e} of its layer's largest"
    ]


def scale_problems(source: Source) -> list[Problem]:
    """Scales outside float16's range."""
    return for_each(
        [
            (linear.name, "has scales above 65504, the maximum of float16, which the format uses; use --to dense")
            for linear in source.linears.values()
            if math.isinf(linear.largest_move)
        ]
    )


def _embedding(checkpoint: Checkpoint) -> str:
    """The input embedding's name, if the runtime knows the architecture; nothing else distinguishes it from linears."""
    try:
        return spec_of(checkpoint.config).names.embedding
    except RuntimeProblem:
        return ""


def _moved_by_float16(scale: Tensor) -> tuple[int, float]:
    exact = scale.double()
    move = (exact.half().double() - exact).abs()
    odd = int((move > 0).sum())
    return odd, (move.max() / exact.abs().max()).item() if odd else 0.0


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
