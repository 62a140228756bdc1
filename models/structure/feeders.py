"""Which norm or linear feeds a linear, found by experiment instead of by architecture.

M feeds L if scaling M's output channel c by s multiplies input channels of L by s and does nothing
else: then a scale can move from L's input columns into M, which is what function-preserving
transforms do. The experiment runs one block in float64 on random weights: scale M's outputs by
distinct factors and look for exactly those factors at L's input. It sees through grouped heads
(one value channel feeds several) and ReLU, and rejects GELU and softmax by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..directory.experts import SplitExperts
from .anatomy import BlockAnatomy, SharedInput, is_linear
from .block_calls import BlockCall, block_calls, holding
from .skeleton import Skeleton

TOKENS = 5  # of an experiment
_TOLERANCE = 1e-6
Key = TypeVar("Key")


@dataclass(frozen=True)
class FeederModule:
    """The module whose output, channel by channel, is the input of a group of linears.

    Attributes:
        module: its name within the block.
        kind: ``norm`` or ``linear``.
        channels: for every input channel of the group, the output channel of ``module`` that scales it.
    """

    module: str
    kind: str
    channels: Tensor


def find_feeders(skeleton: Skeleton, anatomy: BlockAnatomy) -> dict[SharedInput, FeederModule | None]:
    """Find the feeder of every group of linears in a block.

    Returns:
        None for a group where nothing feeds it channel by channel: it reads the residual stream, or a
        function in between does not commute with scaling.
    """
    with experiment(skeleton, anatomy) as (block, call):
        heads = getattr(skeleton.model.config, "num_attention_heads", 1)
        return _experiment(block, call, anatomy, skeleton.hidden_size, heads)


def _experiment(
    block: nn.Module, call: BlockCall, anatomy: BlockAnatomy, width: int, heads: int
) -> dict[SharedInput, FeederModule | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    with all_experts(block):
        plain = group_inputs(block, call, hidden, anatomy)
        found: dict[SharedInput, FeederModule | None] = dict.fromkeys(anatomy.groups)
        for name, module in block.named_modules():
            if not isinstance(getattr(module, "weight", None), nn.Parameter):
                continue
            size = _output_size(block, call, hidden, module)
            if size is None:
                continue
            kind = "linear" if is_linear(module) else "norm"
            inputs = {
                group: plain[group].shape[-1]
                for group in anatomy.groups
                if name not in group.linears and group in plain
            }
            for part in _parts(size, set(inputs.values()), heads if kind == "linear" else 0):
                factors = torch.ones(size, dtype=torch.float64)
                factors[part] = 0.5 + torch.rand(len(part), generator=generator, dtype=torch.float64)
                with module.register_forward_hook(lambda _, args, out, by=factors: out * by):  # type: ignore[operator]
                    scaled = group_inputs(block, call, hidden, anatomy)
                for group in inputs:
                    channels = _match(plain[group], scaled[group], factors, part)
                    if channels is not None:
                        found[group] = FeederModule(name, kind, channels)
    return found


@contextmanager
def experiment(skeleton: Skeleton, anatomy: BlockAnatomy) -> Iterator[tuple[nn.Module, BlockCall]]:
    """A block with random weights in float64, and how its model calls it for a few tokens."""
    index = int(anatomy.name.rpartition(".")[2])
    block, call = skeleton.blocks[index], block_calls(skeleton, 1, TOKENS, torch.float32)[index]
    weights = {f"{anatomy.name}.{name}": _random(parameter) for name, parameter in block.state_dict().items()}
    with torch.no_grad(), holding(skeleton.model, weights):
        yield block, call.map(lambda t: t.double() if t.is_floating_point() else t)


@contextmanager
def put_back(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A block's parameters by name, which it gets back when the context ends."""
    kept = {name: parameter.data.clone() for name, parameter in block.named_parameters()}
    try:
        yield kept
    finally:
        for name, parameter in block.named_parameters():
            parameter.data.copy_(kept[name])


def inputs_of(modules: Mapping[Key, nn.Module], block: nn.Module, call: BlockCall, hidden: Tensor) -> dict[Key, Tensor]:
    """What some modules of a block read, as rows."""
    seen: dict[Key, Tensor] = {}
    with ExitStack() as hooks:
        for key, module in modules.items():

            def note(_: nn.Module, args: tuple[Any, ...], key: Key = key) -> None:
                seen[key] = args[0].reshape(-1, args[0].shape[-1]).clone()

            hooks.enter_context(module.register_forward_pre_hook(note))
        call.run(block, hidden.clone())
    return seen


def group_inputs(block: nn.Module, call: BlockCall, hidden: Tensor, anatomy: BlockAnatomy) -> dict[SharedInput, Tensor]:
    """What each group of linears reads, as rows."""
    modules = {group: block.get_submodule(group.linears[0]) for group in anatomy.groups}
    return inputs_of(modules, block, call, hidden)


def _output_size(block: nn.Module, call: BlockCall, hidden: Tensor, module: nn.Module) -> int | None:
    sizes: list[int] = []
    with module.register_forward_hook(
        lambda _, args, out: sizes.append(out.shape[-1]) if isinstance(out, Tensor) else None
    ):
        call.run(block, hidden.clone())
    return sizes[0] if sizes else None


def _parts(size: int, widths: set[int], heads: int) -> Iterator[Tensor]:
    """Output channels that might feed something: all, or the relevant part of a fused projection."""
    everything = torch.arange(size)
    yield everything
    for width in widths if heads else ():
        rest = size - width
        if rest > 0 and rest % 2 == 0 and rest // 2 <= width:  # q | k | v concatenated
            yield everything[size - rest // 2 :]
        if size == 3 * width and width % heads == 0:  # q, k and v head by head
            yield everything.view(heads, 3, width // heads)[:, 2].flatten()
        if size == 2 * width:  # gate | up
            yield everything[width:]


def _match(plain: Tensor, scaled: Tensor, factors: Tensor, part: Tensor) -> Tensor | None:
    ratio = scaled / plain
    usable = plain.abs() > 1e-9  # ReLU leaves exact zeros, which carry no information
    filled = torch.where(usable, ratio, torch.nan)
    first = torch.nanmedian(filled, dim=0).values
    spread = torch.where(usable, (ratio - first).abs(), 0.0).amax()
    known = usable.any(dim=0)
    if spread > _TOLERANCE or not known.any():
        return None
    distance, position = (first[:, None] - factors[part][None, :]).abs().min(dim=1)
    if torch.where(known, distance, 0.0).amax() > _TOLERANCE:
        return None
    if not known.all():  # channels that ReLU silenced: only an identity map can be filled in
        identity = torch.arange(len(first))
        return identity if len(part) == len(first) and (position[known] == identity[known]).all() else None
    return part[position]


@contextmanager
def all_experts(block: nn.Module) -> Iterator[None]:
    """Send every token to every expert, so that all are seen and scaling cannot change the route."""

    def route(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        assert isinstance(module, SplitExperts)
        hidden = args[0]
        everywhere = torch.arange(len(module)).expand(hidden.shape[0], -1)
        return hidden, everywhere, torch.full(everywhere.shape, 1 / len(module), dtype=hidden.dtype)

    with ExitStack() as hooks:
        for module in block.modules():
            if isinstance(module, SplitExperts):
                hooks.enter_context(module.register_forward_pre_hook(route))
        yield


def _random(parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel())
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise
