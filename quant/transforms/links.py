"""The places in a block where a scale can move, each tried on random weights before it is believed.

``feeders.py`` finds which module feeds which linears. Here everything that reads the same output is
brought together, routers included, and the move itself is carried out in float64: a place where the
block then computes anything else is no link.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...models.structure.anatomy import BlockAnatomy, SharedInput, is_linear
from ...models.structure.block_calls import BlockCall
from ...models.structure.feeders import TOKENS, all_experts, experiment, find_feeders, group_inputs, inputs_of, put_back
from ...models.structure.open_model import OpenModel
from ...models.structure.skeleton import Skeleton
from ..layer_stats import LayerStats
from .link import Feeder, Link, Reader, Readers

# Norms compute in float32 whatever they are given, and Gemma's multiplies by its weight there.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LinkNames:
    """A link by the names of its modules within the block.

    Attributes:
        feeder: the norm or linear that is read.
        kind: ``norm`` or ``linear``.
        channels: for every input channel of the readers, the feeder's output channel.
        offset: what the norm adds to its weight.
        groups: the linears that read it.
        others: routers and gates that read the same tensor as one of the groups.
    """

    feeder: str
    kind: str
    channels: Tensor
    offset: float
    groups: tuple[SharedInput, ...]
    others: tuple[str, ...]


_FOUND: WeakKeyDictionary[OpenModel, dict[object, tuple[LinkNames, ...]]] = WeakKeyDictionary()


def links_of(model: OpenModel, index: int) -> tuple[LinkNames, ...]:
    """The links of a model's block; found once for blocks that are built alike."""
    known = _FOUND.setdefault(model, {})
    shape = model.block_shape(index)
    if shape not in known:
        known[shape] = find_links(model.skeleton, model.anatomy.blocks[index])
    return known[shape]


def find_links(skeleton: Skeleton, anatomy: BlockAnatomy) -> tuple[LinkNames, ...]:
    """All links of a block, in the order in which their readers run. No weights are read."""
    feeders = find_feeders(skeleton, anatomy)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, TOKENS, skeleton.hidden_size, generator=generator, dtype=torch.float64)
    with experiment(skeleton, anatomy) as (block, call):
        with all_experts(block):
            inputs = group_inputs(block, call, hidden, anatomy)
            readers = inputs_of(_other_readers(block), block, call, hidden)
        found = []
        for feeder in dict.fromkeys((f.module, f.kind, tuple(f.channels.tolist())) for f in feeders.values() if f):
            name, kind, channels = feeder
            groups = tuple(
                group
                for group, f in feeders.items()
                if f is not None and f.module == name and tuple(f.channels.tolist()) == channels
            )
            others = tuple(
                other
                for other, tensor in readers.items()
                if other != name and any(tensor.equal(inputs[g]) for g in groups if g in inputs)
            )
            module = block.get_submodule(name)
            offset = norm_offset(module, hidden.shape[-1]) if kind == "norm" else 0.0
            if offset is None:
                continue
            link = LinkNames(name, kind, torch.tensor(channels), offset, groups, others)
            if _keeps_the_function(block, call, hidden, link):
                found.append(link)
    return tuple(found)


def bind(
    link: LinkNames,
    weights: dict[str, Tensor],
    stats: dict[SharedInput, LayerStats],
    schemes: dict,
    stored: torch.dtype,
) -> Link:  # type: ignore[type-arg]
    """A link over a block's weights.

    Args:
        link: its names.
        weights: float32 tensors of the block by their names in it, matrices as ``[rows, columns]``; edited in place.
        stats: what is known of each group's inputs.
        schemes: what each linear will be stored as, by name; absent for those that stay.
        stored: what the checkpoint stores norms in.
    """
    weight = weights[f"{link.feeder}.weight"]
    channels = link.channels.to(weight.device)
    feeder = Feeder(weight, weights.get(f"{link.feeder}.bias"), channels, link.offset, stored)
    groups = []
    for i, group in enumerate(link.groups):
        members = [Reader(name, weights[f"{name}.weight"], schemes.get(name)) for name in group.linears]
        if i == 0:
            members += [Reader(name, weights[f"{name}.weight"], None) for name in link.others]
        groups.append(Readers(tuple(members), stats[group]))
    return Link(feeder, tuple(groups))


def as_rows(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear's weight as ``[rows, columns]``; GPT-2's Conv1D stores it transposed. A view, to edit in place."""
    return weight.T if isinstance(module, Conv1D) and weight.dim() == 2 else weight


def weight_rows(module: nn.Module) -> Tensor:
    """A linear's own weight as ``[rows, columns]``; a view."""
    assert isinstance(module.weight, Tensor)
    return as_rows(module, module.weight.data)


def block_weights(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """A block's parameters by name, in ``dtype``; matrices of linears as ``[rows, columns]``. Views where no change of type is needed."""
    return {
        name: as_rows(block.get_submodule(name.rpartition(".")[0]), parameter.data.to(dtype))
        for name, parameter in block.named_parameters()
    }


def _other_readers(block: nn.Module) -> dict[str, nn.Module]:
    """Modules with a matrix that are no linears of the anatomy: routers and gates."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.dim() == 2
        and not is_linear(module)
    }


def norm_offset(norm: nn.Module, width: int) -> float | None:
    """What a norm adds to its weight: 0 for most, 1 for Gemma's; None if it does something else with it."""
    generator = torch.Generator().manual_seed(2)
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    rows = torch.randn(3, weight.shape[0] if weight.shape[0] != width else width, generator=generator).double()
    kept = weight.data.clone()
    try:
        outputs = []
        for value in (0.0, 1.0):
            weight.data.fill_(value)
            outputs.append(norm(rows))
    except TypeError:  # it takes more than its inputs, such as a gate
        return None
    finally:
        weight.data.copy_(kept)
    bias = getattr(norm, "bias", None)
    zero = outputs[0] if bias is None else outputs[0] - bias
    slope = outputs[1] - outputs[0]
    offset = (zero * slope).sum() / slope.square().sum()
    return round(offset.item(), 4) if torch.allclose(zero, offset * slope, atol=1e-5) else None


def _keeps_the_function(block: nn.Module, call: BlockCall, hidden: Tensor, link: LinkNames) -> bool:
    before = call.run(block, hidden.clone())
    weights = block_weights(block, torch.float64)
    nothing = LayerStats(None, torch.zeros(0, 0), 0)
    bound = bind(link, weights, dict.fromkeys(link.groups, nothing), {}, torch.float64)
    generator = torch.Generator().manual_seed(3)
    with put_back(block):
        bound.move(0.5 + torch.rand(bound.size, generator=generator, dtype=torch.float64))
        after = call.run(block, hidden.clone())
    return bool((after - before).abs().max() <= _TOLERANCE * before.abs().max())
