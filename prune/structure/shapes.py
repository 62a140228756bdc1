"""Smaller shapes of a model: the size of each dimension, the parameters left, and the decode speed on this machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...models.structure.open_model import OpenModel
from ...runtime.measure.shape_time import ModelShape, decode_seconds
from ...system.errors import RuntimeProblem, SmeltError
from ...system.progress import Progress
from . import axes
from .axes import Axis
from .drop_blocks import LAYER_PARTS, can_lose
from .removable import closing_linears
from .slice_width import slice_width

DIMENSIONS = ("blocks", "hidden", "heads", "ffn")
_AXES = {"hidden": axes.hidden, "heads": axes.heads, "ffn": axes.feed_forward}
_SHARES = {"hidden": (0.125, 0.25, 0.375), "ffn": (0.125, 0.25, 0.375, 0.5, 0.625)}
# Multiples that suit groups of scales and kernels, by the width from which they apply.
_MULTIPLES = ((1024, 128), (512, 64), (64, 32), (0, 8))
_MOST_LEVELS = 8
_TIMED_BLOCKS = 8


@dataclass(frozen=True)
class Sizes:
    """The size of each dimension: blocks, hidden channels, groups of heads, feed-forward channels."""

    blocks: int
    hidden: int
    heads: int
    ffn: int


@dataclass(frozen=True)
class SizeGrid:
    """The sizes in the search.

    Attributes:
        whole: the model's own.
        levels: by dimension: all sizes, the whole one first.
    """

    whole: Sizes
    levels: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: OpenModel, multiple: int | None = None) -> SizeGrid:
        """The sizes that a model allows; a dimension that it lacks has only one size.

        Args:
            model: the whole model.
            multiple: widths are multiples of it; by default of a suitable one.
        """
        levels: dict[str, tuple[int, ...]] = {}
        depth = len(model.anatomy.blocks)
        step = -(-depth // (2 * _MOST_LEVELS))
        possible = [depth - gone for gone in range(step, depth, step) if can_lose(model, range(depth - gone, depth))]
        levels["blocks"] = (depth, *possible[:_MOST_LEVELS])
        for name in ("hidden", "heads", "ffn"):
            levels[name] = _widths(model, name, multiple)
        return cls(Sizes(**{name: each[0] for name, each in levels.items()}), levels)

    def __iter__(self) -> Iterator[Sizes]:
        for each in itertools.product(*(self.levels[name] for name in DIMENSIONS)):
            yield Sizes(*each)

    @property
    def worst_case(self) -> Sizes:
        """The sizes that the fewest group sizes divide: what works for these works for all."""
        odd = {name: min(each, key=lambda size: size & -size) for name, each in self.levels.items() if name != "blocks"}
        return Sizes(blocks=self.levels["blocks"][-1], **odd)

    def alone(self) -> Iterator[tuple[str, int]]:
        """Every smaller size of every dimension."""
        for name in DIMENSIONS:
            for size in self.levels[name][1:]:
                yield name, size


def _widths(model: OpenModel, name: str, multiple: int | None) -> tuple[int, ...]:
    try:
        axis = _AXES[name](model)
    except SmeltError:
        return (1,)
    if name == "heads":
        found = list(range(axis.units - 1, 0, -1))
    else:
        multiple = multiple or next(each for width, each in _MULTIPLES if axis.units >= width)
        found = [round(axis.units * (1 - share) / multiple) * multiple for share in _SHARES[name]]
    possible = (size for size in dict.fromkeys(found) if 0 < size < axis.units and axes.is_possible(model, axis, size))
    return (axis.units, *itertools.islice(possible, _MOST_LEVELS - 1))


class Costs:
    """Parameter counts of sizes, and optionally measured decode-step times.

    A model consists of what surrounds its blocks and, for each block, its attention and feed-forward part; these are
    counted and timed separately. Which blocks are removed is not known yet: if they differ, those that cost least are
    assumed, so that the result is an upper bound.

    Args:
        model: the model.
        grid: the sizes.
        rotated: whether a smaller hidden size needs an untied lm_head.
    """

    def __init__(self, model: OpenModel, grid: SizeGrid, *, rotated: bool) -> None:
        self._model, self._grid = model, grid
        self._kinds = _alike(model)
        self._around: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        # What a smaller size saves in each block.
        self._saved: dict[tuple[str, int, int], list[int]] = {}
        self._seconds_around: dict[int, float] = {}
        self._seconds: dict[tuple[str, int, int], list[float]] = {}
        for hidden in grid.levels["hidden"]:
            one = self._smaller("hidden", model, hidden)
            blocks = self._blocks[hidden] = one.block_numels
            self._around[hidden] = parameters_of(one) - sum(blocks)
            if rotated and model.is_tied and hidden < grid.whole.hidden:
                self._around[hidden] += model.vocabulary() * hidden
            for name in ("heads", "ffn"):
                for size in grid.levels[name]:
                    smaller = self._smaller(name, one, size).block_numels
                    self._saved[name, hidden, size] = [a - b for a, b in zip(blocks, smaller, strict=True)]

    def parameters(self, sizes: Sizes) -> int:
        """An upper bound of the number of parameters."""
        saved = (self._saved[name, sizes.hidden, getattr(sizes, name)] for name in ("heads", "ffn"))
        blocks = (whole - sum(less) for whole, *less in zip(self._blocks[sizes.hidden], *saved, strict=True))
        return self._around[sizes.hidden] + sum(sorted(blocks, reverse=True)[: sizes.blocks])

    def seconds(self, sizes: Sizes) -> float:
        """An upper bound of a decode step's time, once measured."""
        parts = (self._seconds[name, sizes.hidden, getattr(sizes, name)] for name in ("heads", "ffn"))
        blocks = (sum(each) for each in zip(*parts, strict=True))
        return self._seconds_around[sizes.hidden] + sum(sorted(blocks, reverse=True)[: sizes.blocks])

    def measure(self, batch: int, context: int, progress: Progress) -> None:
        """Time all parts at all sizes on this machine's runtime.

        Raises:
            SmeltError: the runtime does not serve such models, or they have one block only.
        """
        depth = self._grid.whole.blocks
        if depth < 2:
            raise SmeltError(
                "target.latency: a model of one block cannot be timed by differences; give a target of params"
            )
        rounds = list(itertools.product(self._grid.levels["hidden"], self._kinds))
        for name, levels in self._grid.levels.items():
            if name in ("heads", "ffn"):
                for hidden, size in itertools.product(self._grid.levels["hidden"], levels):
                    self._seconds[name, hidden, size] = [0.0] * depth
        alone: dict[int, tuple[int, float]] = {}
        for hidden, kind in progress.track(rounds, "timing shapes", len(rounds)):
            # Some attention must remain: in a block of another kind, if there is one.
            base = next((index for index in range(depth) if index not in kind), kind[0])
            members = [index for index in kind if index != base][:_TIMED_BLOCKS]
            one = self._smaller("hidden", self._model, hidden)
            shapes, labels = [_part_shape(one, {base: "attention"})], [("base", 0)]
            for name in ("heads", "ffn"):
                part = "attention" if name == "heads" else "mlp"
                for size in self._grid.levels[name]:
                    smaller = self._smaller(name, one, size)
                    shapes.append(_part_shape(smaller, {base: "attention"} | dict.fromkeys(members, part)))
                    labels.append((name, size))
                    if name == "heads":
                        shapes.append(_part_shape(smaller, {base: "attention"}))
                        labels.append(("one", size))
            try:
                timed = decode_seconds(shapes, one.dtype, batch=batch, context=context, log=progress.say)
            except RuntimeProblem as problem:
                raise SmeltError(f"target.latency: {problem}; give a target of params") from None
            found = dict(zip(labels, timed, strict=True))
            alone.setdefault(hidden, (base, found["base", 0]))
            for (name, size), seconds in found.items():
                if name in ("heads", "ffn"):
                    without = found["one", size] if name == "heads" else found["base", 0]
                    for index in kind:
                        self._seconds[name, hidden, size][index] = max(0.0, (seconds - without) / len(members))
        for hidden, (base, seconds) in alone.items():
            attention = self._seconds["heads", hidden, self._grid.whole.heads][base]
            self._seconds_around[hidden] = max(0.0, seconds - attention)

    def as_data(self) -> dict[str, float]:
        """The timings, for the record: milliseconds by part, hidden size and size; by kind of block, if several."""
        found = {f"around {hidden} 0": seconds for hidden, seconds in self._seconds_around.items()}
        for (name, hidden, size), seconds in self._seconds.items():
            for kind in self._kinds:
                where = "" if len(self._kinds) == 1 else f", blocks like {kind[0]}"
                found[f"{name} {hidden} {size}{where}"] = seconds[kind[0]]
        return {name: round(1e3 * seconds, 4) for name, seconds in found.items()}

    def _smaller(self, name: str, model: OpenModel, size: int) -> OpenModel:
        if size == getattr(self._grid.whole, name):
            return model
        axis: Axis = _AXES[name](model)
        return slice_width(model, axis, size)


def parameters_of(model: OpenModel) -> int:
    """A model's number of parameters."""
    return sum(math.prod(model.weights.info(name).shape) for name in model.weights.names())


def _alike(model: OpenModel) -> list[list[int]]:
    """Blocks by kind."""
    found: dict[object, list[int]] = {}
    for index in range(len(model.anatomy.blocks)):
        found.setdefault(model.block_shape(index), []).append(index)
    return list(found.values())


def timing_bytes(model: OpenModel, grid: SizeGrid, batch: int, context: int) -> int:
    """Memory for timing: all shapes of one hidden size at once, each with its embedding, lm_head and cache."""
    shapes = 1 + 2 * len(grid.levels["heads"]) + len(grid.levels["ffn"])
    blocks = min(grid.whole.blocks, _TIMED_BLOCKS)
    around = 3 * model.embedding_bytes()
    cache = 2 * batch * context * min(facts.rows for facts in model.block_linears) * model.dtype.itemsize
    attending = 1 + len(grid.levels["heads"]) * (2 + blocks) + len(grid.levels["ffn"])
    return shapes * (around + (blocks + 1) * model.largest_block() * model.dtype.itemsize) + attending * cache


def shape_of(model: OpenModel) -> ModelShape:
    """The shape of a model, without the output matrices of removed parts."""
    return _shape(model, model.config, getattr(model.config, LAYER_PARTS, None))


def _part_shape(model: OpenModel, left: Mapping[int, str]) -> ModelShape:
    """The shape of a model in which some blocks have one part, and the others none."""
    config = model.directory.config()
    parts = [left.get(index, "none") for index in range(len(model.anatomy.blocks))]
    setattr(config, LAYER_PARTS, parts)
    return _shape(model, config, parts)


def _shape(model: OpenModel, config: Any, parts: list[str] | None) -> ModelShape:
    gone: set[str] = set()
    for kind in ("attention", "mlp") if parts is not None else ():
        for anatomy, part, names in zip(model.anatomy.blocks, parts or (), closing_linears(model, kind), strict=True):
            if part not in ("all", kind):
                gone |= {model.names[f"{anatomy.name}.{name}.weight"] for name in names}
    names = model.weights.names()
    return ModelShape(config, {name: model.weights.info(name).shape for name in names if name not in gone})
