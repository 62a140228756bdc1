"""Test cases of the linear kernels: random weights and inputs, a launch, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, moved, poisoned
from ..base.launch import Launch
from ..base.targets import Target
from ..base.workspace import Workspace
from ..tiles.tile import LinearShape, Tile, Tiles, tiles_of, tiles_of_target
from .routing import Routing, most_blocks, route


class LinearCase:
    """A weight and a launch, with random inputs; each kernel has a dataclass of this kind.

    Attributes:
        rows, outputs, columns, dtype, gate, bias, residual: of the product.
        in_place: whether outputs are written over their residual.
        out: the outputs' dtype; None for the inputs' own.
        tile: None for the shipped one.
        experts: how many there are, of which each row goes to two.
        by_slot: whether each of the two reads a row of its own.
        prepare, product, start, reference: of the kernel: packing, computing, a launch, float64.
        small: sizes of a weight whose contents do not matter.
    """

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    gate: str
    bias: bool
    residual: bool
    in_place: bool
    tile: Tile | None
    experts: int
    out: torch.dtype | None = None
    by_slot: bool = False
    prepare: ClassVar[Callable[..., Any]]
    product: ClassVar[Callable[..., Tensor]]
    start: ClassVar[Callable[..., Launch]]
    reference: ClassVar[Callable[..., Tensor]]

    @property
    def key(self) -> str:
        """Of its tiles, ``kernel/form``."""
        raise NotImplementedError

    @property
    def bits(self) -> int:
        """Of a weight."""
        raise NotImplementedError

    @property
    def block(self) -> int:
        """Columns that are unpacked together."""
        raise NotImplementedError

    @property
    def shape(self) -> LinearShape:
        """That its tile is looked up by."""
        raise NotImplementedError

    @property
    def stored(self) -> tuple[str, ...]:
        """How the weight is, for the name."""
        return ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of its targets; empty for all."""
        return ()

    @property
    def streamed(self) -> tuple[str, ...]:
        """Arguments that are read with 16-byte loads."""
        return ("weight",)

    @property
    def shares(self) -> torch.dtype | None:
        """Of what experts' outputs are multiplied by; None if they are not."""
        return None

    @property
    def name(self) -> str:
        """For messages."""
        options = [name for name in ("zero", "bias", "residual", "in_place") if getattr(self, name, False)]
        options += [self.gate] if self.gate != "none" else []
        options += [f"to {self.out}"] if self.out else []
        options += [f"{self.experts} experts{' by slot' * self.by_slot}"] if self.experts else []
        size = f"{self.rows}x{self.columns} by {self.outputs} {self.dtype}"
        return " ".join([*self.stored, size, *options, str(self.tile or "")]).replace("torch.", "").strip()

    @property
    def small(self) -> dict[str, int]:
        return {"outputs": 128, "columns": 512}

    def weight(self, draw: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of ``prepare`` and of ``reference``."""
        raise NotImplementedError

    def packed(self, device: torch.device) -> Any:
        """A weight for timing."""
        return self.prepare(**self.weight(torch.Generator(device).manual_seed(0))[0])

    def tile_on(self, tiles: Tiles) -> Tile:
        """Its tile, or the shipped one."""
        kernel, _, form = self.key.partition("/")
        return self.tile or tiles.find(kernel, form, self.shape, self.block)

    def drawn_bias(self, draw: torch.Generator) -> dict[str, Tensor]:
        """The argument of both, if it has one."""
        return {"bias": _random(draw, self.outputs).to(self.dtype)} if self.bias else {}

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """One product."""
        tile, kept = self.tile_on(tiles_of(device)), self.out or self.dtype
        x = _random(draw, self.rows, self.columns).to(self.dtype).to(device)
        packed, plain = (moved(each, device) for each in self.weight(draw))
        weight = self.prepare(**packed)
        residual = _random(draw, self.rows, weight.outputs).to(kept).to(device) if self.residual else None
        expected = self.reference(x, **plain, residual=residual)

        def compute() -> Tensor:
            if self.in_place and residual is not None:
                out = added = residual.clone()
            else:
                out, added = poisoned(self.rows, weight.outputs, kept, device), residual
            return self.product(x, weight, tile, out=out, residual=added)

        return PreparedCase(compute, expected, weight.nbytes)

    def trial_of_experts(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """Each token goes to two of the experts."""
        tile, slots = self.tile_on(tiles_of(device)), 2 * self.rows
        x = _random(draw, slots if self.by_slot else self.rows, self.columns).to(self.dtype).to(device)
        each = [moved(list(self.weight(draw)), device) for _ in range(self.experts)]
        chosen = torch.rand(self.rows, self.experts, generator=draw, device=draw.device).argsort(-1)[:, :2].to(device)
        shares = None
        if self.shares is not None:
            shares = torch.rand(self.rows, 2, generator=draw, device=draw.device).to(self.shares).to(device)
        weights = [self.prepare(**packed) for packed, _ in each]
        weight = weights[0].joined(weights)
        routing = route(chosen, self.experts, tile.rows, by_slot=self.by_slot, shares=shares)
        expected = torch.empty(slots, weight.outputs, dtype=torch.float64, device=device)
        for expert, (_, plain) in enumerate(each):
            those = torch.where(chosen.flatten() == expert)[0]
            expected[those] = self.reference(x[those if self.by_slot else those // 2], **plain)
        if shares is not None:
            expected *= shares.double().view(-1, 1)

        def compute() -> Tensor:
            return self.product(
                x, weight, tile, out=poisoned(slots, weight.outputs, self.dtype, device), routing=routing
            )

        return PreparedCase(compute, expected, weight.nbytes)

    def case(self, large: bool = False) -> Case:
        """For the checks."""
        prepare = self.trial_of_experts if self.experts else self.trial
        return Case(self.name, prepare, TOLERANCE[self.dtype], large, self.targets, self.launch)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """The first arguments of a launch, on ``meta``."""
        return (torch.empty(self.rows, self.columns, dtype=self.dtype, device=device),)

    def launch(self, target: Target) -> Launch:
        """On ``meta``, for compilation. The weight's contents do not matter, so a small one is used."""
        meta, tile = torch.device("meta"), self.tile_on(tiles_of_target(target))
        small: Any = replace(self, **self.small)  # pyright: ignore[reportArgumentType, reportCallIssue]
        weight = self.prepare(**small.weight(torch.Generator().manual_seed(0))[0])
        routing = None
        if self.experts:
            weight = weight.joined([weight] * self.experts)
            blocks = torch.empty(most_blocks(2 * self.rows, self.experts, tile.rows), dtype=torch.int32, device=meta)
            slots = torch.empty(blocks.shape[0] * tile.rows, dtype=torch.int32, device=meta)
            shares = None if self.shares is None else torch.empty(2 * self.rows, dtype=self.shares, device=meta)
            routing = Routing(slots, blocks, 2 * self.rows, 1 if self.by_slot else 2, shares)
        weight = replace(weight, rows=self.outputs, columns=self.columns, **moved(weight.tensors(), meta))
        out = torch.empty(self.rows, weight.outputs, dtype=self.out or self.dtype, device=meta)
        residual = out if self.residual else None
        return self.start(*self.inputs(meta), weight, tile, out, Workspace(meta), residual=residual, routing=routing)

    def build(self) -> Build:
        """For the checks of machine code."""
        wide = self.shape.rows >= 64
        return Build(self.name, self.launch, matrix=True, streamed=self.streamed, wide=wide, targets=self.targets)


def linear_kernel(
    name: str,
    small: Sequence[LinearCase],
    large: Sequence[LinearCase],
    builds: Sequence[LinearCase],
    rare: Sequence[LinearCase],
) -> Kernel:
    """A kernel with its cases, of which the large ones need a GPU, and its builds."""
    return Kernel(
        name,
        [*(case.case() for case in small), *(case.case(large=True) for case in large)],
        [*(case.build() for case in builds), *(replace(case.build(), rare=True) for case in rare)],
    )


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, device=draw.device)
