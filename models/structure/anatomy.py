"""The structure of a decoder: its blocks, and in each block which linears read the same input.

Nothing here knows an architecture by name. One call of each block on the meta device shows which
linears run, in which order, and which of them get the same tensor; ``feeders.py`` then finds
by experiment which norm or linear produces that tensor.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...system.errors import SmeltError, first_line
from .block_calls import BlockCall, block_calls
from .skeleton import Skeleton


@dataclass(frozen=True)
class SharedInput:
    """Linears of a block that read the same tensor.

    Attributes:
        linears: their names within the block, in the order they run.
        phase: groups of one phase may be treated together; the experts of a layer share a phase.
    """

    linears: tuple[str, ...]
    phase: str


@dataclass(frozen=True)
class Tail:
    """A part of a block whose result is what its last linear returns, untouched.

    Attributes:
        part: the part's name within the block, such as ``self_attn``.
        linear: its last linear, such as ``self_attn.o_proj``.
        extras: how many values (all None) the part returns after it; None if it returns a bare tensor.
    """

    part: str
    linear: str
    extras: int | None


@dataclass(frozen=True)
class BlockAnatomy:
    """One decoder block.

    Attributes:
        name: its full name, such as ``model.layers.3``.
        groups: linears by shared input, in the order they run.
        tails: parts that can be skipped once the inputs of their last linear are known.
        unknown: matrices of the block that are not in a known kind of linear; they are left unchanged.
    """

    name: str
    groups: tuple[SharedInput, ...]
    tails: tuple[Tail, ...]
    unknown: tuple[str, ...]

    @property
    def linears(self) -> list[str]:
        """Full names of all linears."""
        return [f"{self.name}.{linear}" for group in self.groups for linear in group.linears]

    def local_names(self, wanted: Container[str]) -> dict[str, str]:
        """The wanted linears: full name to name within the block."""
        return {name: name.removeprefix(f"{self.name}.") for name in self.linears if name in wanted}

    def wanted_groups(self, wanted: Container[str], groups: Iterable[SharedInput] | None = None) -> list[SharedInput]:
        """Groups reduced to the wanted linears; empty groups are dropped.

        Args:
            wanted: full names of linears.
            groups: some of the block's groups; all by default.
        """
        kept = (
            SharedInput(tuple(name for name in group.linears if f"{self.name}.{name}" in wanted), group.phase)
            for group in (self.groups if groups is None else groups)
        )
        return [group for group in kept if group.linears]

    def phases(self) -> list[list[SharedInput]]:
        """Groups that run at the same depth, in order: q/k/v, then o, then gate/up, then down."""
        phases: dict[str, list[SharedInput]] = {}
        for group in self.groups:
            phases.setdefault(group.phase, []).append(group)
        return list(phases.values())


@dataclass(frozen=True)
class Anatomy:
    """A decoder-only causal LM.

    Attributes:
        blocks: the decoder blocks in order.
        head: the output head's full name.
        tied: whether the head shares the input embedding's weight.
        unknown: what Smelt did not recognize, as sentences.
    """

    blocks: tuple[BlockAnatomy, ...]
    head: str
    tied: bool
    unknown: tuple[str, ...]

    def linears(self) -> list[str]:
        """Full names of all linears inside blocks, in order."""
        return [name for block in self.blocks for name in block.linears]


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``x W`` with a plain weight: nn.Linear, or GPT-2's transposed Conv1D."""
    return isinstance(module, (nn.Linear, Conv1D)) and "Router" not in type(module).__name__ and not _is_gate(module)


def study(skeleton: Skeleton) -> Anatomy:
    """Find the anatomy of a model. No weights are read.

    Raises:
        SmeltError: the model's blocks cannot be called one by one.
    """
    dtype = next(skeleton.model.parameters()).dtype
    calls = block_calls(skeleton, 1, 8, dtype)
    known: dict[Any, BlockAnatomy] = {}
    blocks = []
    for i, (block, call) in enumerate(zip(skeleton.blocks, calls, strict=True)):
        shape = tuple((name, type(module)) for name, module in block.named_modules())
        if shape not in known:
            known[shape] = _study_block(block, call, skeleton.hidden_size)
        blocks.append(replace(known[shape], name=f"{skeleton.blocks_name}.{i}"))
    unknown = [f"{path}: experts in an unknown layout; left unchanged" for path in skeleton.fused_experts]
    unknown += [f"{b.name}.{name}: not a known linear; left unchanged" for b in blocks for name in b.unknown]
    return Anatomy(tuple(blocks), skeleton.head_name, skeleton.tied, tuple(unknown))


def _study_block(block: nn.Module, call: BlockCall, width: int) -> BlockAnatomy:
    # The tensors are kept alive here, so that identities stay distinct.
    reads: list[tuple[str, Any]] = []
    returns: dict[str, Any] = {}
    handles = []
    for name, module in block.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: reads.append((name, args[0]))))
        handles.append(module.register_forward_hook(lambda _, args, out, name=name: returns.__setitem__(name, out)))
    dtype = next(block.parameters()).dtype
    try:
        call.map(lambda t: t.to("meta")).run(block, torch.empty(1, 8, width, dtype=dtype, device="meta"))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise SmeltError(
            f"{type(block).__name__}: Smelt does not understand this kind of block ({first_line(error)}); the architecture is not supported"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[int, list[str]] = {}
    for name, tensor in reads:
        group = groups.setdefault(id(tensor), [])
        if name not in group:
            group.append(name)
    reached = {name for name, _ in reads}
    unknown = [
        name
        for name, parameter in block.named_parameters()
        if parameter.dim() > 1 and name.rpartition(".")[0] not in reached and not _is_router(block, name)
    ]
    shared = tuple(SharedInput(tuple(group), _phase(group[0])) for group in groups.values())
    return BlockAnatomy("", shared, _tails(block, reads, returns), tuple(unknown))


def _tails(block: nn.Module, reads: list[tuple[str, Any]], returns: dict[str, Any]) -> tuple[Tail, ...]:
    found = []
    for part, _ in block.named_children():
        inside = [name for name, _ in reads if name == part or name.startswith(part + ".")]
        out = returns.get(part)
        if not inside or out is None:
            continue
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        if first is returns[inside[-1]] and all(value is None for value in rest or ()):
            found.append(Tail(part, inside[-1], None if rest is None else len(rest)))
    return tuple(found)


def _phase(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _is_gate(module: nn.Module) -> bool:
    """A linear with one output gates a whole branch, such as Qwen2-MoE's shared expert; servers keep it unquantized."""
    return isinstance(module, nn.Linear) and module.out_features == 1


def _is_router(block: nn.Module, parameter: str) -> bool:
    """A router is small and sensitive, and every toolkit keeps it in full precision."""
    module = block.get_submodule(parameter.rpartition(".")[0])
    return "Router" in type(module).__name__ or _is_gate(module)
