"""Mixture-of-experts layers with one linear per projection, as checkpoints store them.

transformers fuses the experts of a layer into three-dimensional parameters when it loads them.
Quantization needs each projection's inputs and stores each under its name, so the skeleton
keeps them separate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter


@dataclass(frozen=True)
class ProjectionNames:
    """What a checkpoint calls the three projections of an expert."""

    gate: str
    up: str
    down: str


class SplitExperts(nn.ModuleList):
    """Drop-in for a fused experts module: same call, same sum, one small module per expert."""

    def __init__(self, fused: nn.Module, names: ProjectionNames) -> None:
        super().__init__()
        count, double, hidden = cast(Tensor, fused.gate_up_proj).shape
        self._names = names
        # Experts that also run on tokens routed elsewhere, so that calibration has inputs for those that no token reaches.
        self.shown_all: set[int] = set()
        # How many tokens reach each expert, and the summed norms of its outputs, while these are recorded.
        self.watching: tuple[Tensor, Tensor] | None = None
        # Not a submodule: its fused parameters stay on the meta device and are never used.
        self._gate: Callable[[Tensor], Tensor] = fused._apply_gate  # type: ignore[assignment]
        for _ in range(count):
            expert = nn.Module()
            expert.add_module(names.gate, nn.Linear(hidden, double // 2, bias=False))
            expert.add_module(names.up, nn.Linear(hidden, double // 2, bias=False))
            expert.add_module(names.down, nn.Linear(double // 2, hidden, bias=False))
            self.append(expert)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden.is_meta:  # routing has no values here; let a trace see every expert once
            for expert in self:
                self._run(expert, hidden.clone())
            return torch.empty_like(hidden)
        total = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            token, place = torch.where(top_k_index == index)
            if index in self.shown_all:
                everywhere = self._run(expert, hidden)
                output = everywhere[token] * top_k_weights[token, place, None]
                self._add(total, index, token, output)
            elif token.numel():
                output = self._run(expert, hidden[token]) * top_k_weights[token, place, None]
                self._add(total, index, token, output)
        return total

    def _add(self, total: Tensor, index: int, token: Tensor, output: Tensor) -> None:
        if self.watching is not None:
            reached, added = self.watching
            reached[index] += token.numel()
            added[index] += output.float().norm(dim=-1).sum().double()
        total.index_add_(0, token, output.to(total.dtype))

    def _run(self, expert: nn.Module, hidden: Tensor) -> Tensor:
        gate = expert.get_submodule(self._names.gate)(hidden)
        up = expert.get_submodule(self._names.up)(hidden)
        return expert.get_submodule(self._names.down)(self._gate(torch.cat((gate, up), dim=-1)))


@contextmanager
def watched(experts: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Record, for each expert, how many tokens reach it and the sum of the norms of its outputs for them."""
    assert isinstance(experts, SplitExperts)
    sums = torch.zeros(len(experts), dtype=torch.float64), torch.zeros(len(experts), dtype=torch.float64)
    experts.watching = sums
    try:
        yield sums
    finally:
        experts.watching = None


@contextmanager
def shown_all_tokens(block: nn.Module, linears: list[str]) -> Iterator[None]:
    """Run the experts that these linears belong to on every token, regardless of the router; outputs do not change.

    Args:
        block: where they are.
        linears: names within the block.
    """
    changed: list[SplitExperts] = []
    try:
        for name, module in block.named_modules():
            if isinstance(module, SplitExperts):
                inside = [linear.removeprefix(f"{name}.") for linear in linears if linear.startswith(f"{name}.")]
                module.shown_all = {int(path.split(".")[0]) for path in inside}
                changed.append(module)
        yield
    finally:
        for module in changed:
            module.shown_all = set()


def unfuse_experts(model: nn.Module) -> list[str]:
    """Replace every fused experts module of a meta model whose layout is known.

    Returns:
        The names of modules whose experts were left fused because their layout is not known.
    """
    names = _projection_names(model)
    unknown = []
    for path, module in list(model.named_modules()):
        if not (isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and hasattr(module, "down_proj")):
            continue
        plain = (
            names is not None
            and module.gate_up_proj.dim() == 3  # type: ignore[union-attr, operator]
            and getattr(module, "is_concatenated", False)
            and not getattr(module, "is_transposed", True)
            and not getattr(module, "has_bias", True)
            and not getattr(module, "has_post_expert_norm", False)
        )
        if plain and names is not None:
            with torch.device("meta"):
                model.set_submodule(path, SplitExperts(module, names))
        else:
            unknown.append(path)
    return unknown


def _projection_names(model: nn.Module) -> ProjectionNames | None:
    found: dict[str, list[str]] = {}
    for conversion in get_model_conversion_mapping(model):  # type: ignore[arg-type]
        if not isinstance(conversion, WeightConverter):
            continue
        leaves = [re.search(r"experts\.\*\.([^.]+)\.weight", p) for p in conversion.source_patterns]
        target = conversion.target_patterns[0].rsplit(".", 1)[-1]
        if all(leaves):
            found[target] = [leaf.group(1) for leaf in leaves if leaf]
    if len(found.get("gate_up_proj", [])) == 2 and len(found.get("down_proj", [])) == 1:
        return ProjectionNames(*found["gate_up_proj"], *found["down_proj"])
    return None
