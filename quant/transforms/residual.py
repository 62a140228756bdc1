"""The residual stream: what reads it, what writes it, and whether its hidden states can be rotated without changing the function.

Norms' gains are folded into their readers; then every reader's columns, every writer's rows and the
embeddings may be rotated by one orthogonal matrix. Which matrices these are is found by experiment, and each rotation
is first tried on random weights in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...models.structure.anatomy import BlockAnatomy
from ...models.structure.attention import head_width
from ...models.structure.block_calls import BlockCall, head_replaced, holding, outer_parameters, set_tensor, stubbed
from ...models.structure.feeders import TOKENS, experiment, put_back
from ...models.structure.skeleton import Skeleton
from .links import LinkNames, as_rows, norm_offset, weight_rows
from .rotation import Rotation

_TOLERANCE = 1e-6  # norms compute in float32 whatever they are given
Load = Callable[[str], Tensor]


@dataclass(frozen=True)
class ValueHeads:
    """Value heads, whose channels may be rotated within each head.

    Attributes:
        feeder: the linear that makes the values.
        rows: its output channels, head after head.
        reader: the linear that reads what attention makes of them.
        width: channels of a head.
    """

    feeder: str
    rows: Tensor
    reader: str
    width: int


@dataclass(frozen=True)
class BlockResidual:
    """How a block takes part in the residual stream; names are within the block.

    Attributes:
        norms: links whose norm reads the residual stream.
        writers: linears whose output is added to it.
        heads: value heads that can be rotated; None if there are none.
        centred: whether a norm subtracts the mean, which commutes only with rotations that keep it.
    """

    norms: tuple[LinkNames, ...]
    writers: tuple[str, ...]
    heads: ValueHeads | None
    centred: bool

    def edited(self, name: str, load: Load, rotation: Rotation | None, head_rotation: Rotation | None) -> Tensor:
        """Parameter ``name`` with norms folded and hidden states rotated.

        Args:
            name: a parameter of the block.
            load: gives the original parameters, matrices as ``[rows, columns]``.
            rotation: of the hidden states; None to fold norms only.
            head_rotation: of the value heads.
        """
        module, _, leaf = name.rpartition(".")
        tensor = load(name).double()
        for link in self.norms:
            gain = None
            if module == link.feeder or module in _readers(link):
                gain = load(f"{link.feeder}.weight").double() + link.offset
            if module == link.feeder:
                assert gain is not None
                return _folded(tensor, leaf, gain, link.offset, rotation)
            if module in _readers(link) and leaf == "weight":
                assert gain is not None
                tensor = tensor * gain[link.channels]
                tensor = tensor if rotation is None else rotation.apply(tensor)
        if self.heads is not None and head_rotation is not None:
            if module == self.heads.feeder:
                tensor = tensor.clone()
                part = tensor[self.heads.rows]
                tensor[self.heads.rows] = (
                    head_rotation.apply_to_parts(part.T).T if part.dim() > 1 else head_rotation.apply_to_parts(part)
                )
            elif module == self.heads.reader and leaf == "weight":
                tensor = head_rotation.apply_to_parts(tensor)
        if module in self.writers and rotation is not None:
            tensor = rotation.apply(tensor.T).T if tensor.dim() > 1 else rotation.apply(tensor)
        return tensor


@dataclass(frozen=True)
class OuterResidual:
    """How what surrounds the blocks takes part in the residual stream; names are full.

    Attributes:
        tables: matrices besides the embedding whose rows enter it, such as learned positions.
        norm: the norm before the head; None if there is none.
        offset: what it adds to its weight.
        centred: whether it subtracts the mean.
    """

    tables: tuple[str, ...]
    norm: str | None
    offset: float
    centred: bool


def find_block_residual(skeleton: Skeleton, anatomy: BlockAnatomy, links: tuple[LinkNames, ...]) -> BlockResidual | str:
    """How a block takes part, or a phrase that says why its hidden states cannot be rotated."""
    width = skeleton.hidden_size
    norms = tuple(link for link in links if link.kind == "norm" and len(link.channels) == width)
    reading = {name for link in norms for name in _readers(link)}
    linears = [name for group in anatomy.groups for name in group.linears]
    with experiment(skeleton, anatomy) as (block, call):
        rows = {name: weight_rows(block.get_submodule(name)).shape[0] for name in linears}
        writers = tuple(name for name in linears if name not in reading and rows[name] == width)
        centred = any(subtracts_mean(block.get_submodule(link.feeder)) for link in norms)
        plain = BlockResidual(norms, writers, None, centred)
        if not norms or not _commutes(block, call, width, plain):
            return f"something in {anatomy.name} ({type(block).__name__}) does not commute with a rotation, such as a norm after attention"
        for link in links:
            heads = _heads(link, skeleton)
            found = replace(plain, heads=heads)
            if heads and heads.reader in writers and _commutes(block, call, width, found):
                return found
    return plain


def find_outer_residual(skeleton: Skeleton) -> OuterResidual | str:
    """How embeddings and head take part, or a phrase that says why hidden states cannot be rotated between them."""
    width = skeleton.hidden_size
    if skeleton.embedding_width != width:
        return "its embedding is narrower than its blocks"
    outer = outer_parameters(skeleton)
    tables = tuple(name for name, p in outer.items() if p.dim() == 2 and p.shape[1] == width)
    norms = [
        name.removesuffix(".weight")
        for name, p in outer.items()
        if tuple(p.shape) == (width,) and name.endswith(".weight")
    ]
    for norm in [*norms, None]:
        module = skeleton.model.get_submodule(norm) if norm else None
        filled = {name: _random(p) for name, p in outer.items()}
        with torch.no_grad(), holding(skeleton.model, filled):
            offset = norm_offset(module, width) if module is not None else 0.0
            if offset is None:
                continue
            found = OuterResidual(tables, norm, offset, module is not None and subtracts_mean(module))
            if _outer_commutes(skeleton, found):
                return found
    return "a module between its embedding, its blocks and its output head does not commute with a rotation"


def folded_norm(tensor: Tensor, leaf: str, gain: Tensor, offset: float, rotation: Rotation | None) -> Tensor:
    """A norm's weight or bias once its gain is in its readers and its outputs are rotated."""
    return _folded(tensor.double(), leaf, gain.double() + offset, offset, rotation)


def subtracts_mean(norm: nn.Module) -> bool:
    """Whether a norm gives the same for inputs that are all larger by one."""
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(3, weight.shape[0], generator=generator, dtype=torch.float64)
    return torch.allclose(norm(rows), norm(rows + 1), atol=1e-4)


def _readers(link: LinkNames) -> set[str]:
    return {name for group in link.groups for name in group.linears} | set(link.others)


def _folded(tensor: Tensor, leaf: str, gain: Tensor, offset: float, rotation: Rotation | None) -> Tensor:
    if leaf == "weight":
        return torch.full_like(tensor, 1 - offset)
    # The readers multiply by the gain now, so the bias is divided by it; a channel without gain must have no bias.
    bias = torch.where(gain == 0, torch.zeros_like(tensor), tensor / torch.where(gain == 0, 1.0, gain))
    return bias if rotation is None else rotation.apply(bias)


def _heads(link: LinkNames, skeleton: Skeleton) -> ValueHeads | None:
    config = skeleton.model.config
    count = getattr(config, "num_attention_heads", None)
    width = head_width(config) if count else None
    rows = link.channels.unique()
    readers = [name for group in link.groups for name in group.linears]
    if link.kind != "linear" or not width or len(rows) % width or len(link.channels) % width or len(readers) != 1:
        return None
    return ValueHeads(link.feeder, rows, readers[0], width)


def _commutes(block: nn.Module, call: BlockCall, width: int, residual: BlockResidual) -> bool:
    """Whether the edited block's outputs for rotated inputs are the block's own outputs, rotated."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    rotation = Rotation.random(width, generator, keep_ones=residual.centred)
    head_rotation = Rotation.random(residual.heads.width, generator) if residual.heads else None
    before = rotation.apply(call.run(block, hidden.clone()))
    with put_back(block) as kept:

        def load(name: str) -> Tensor:
            return as_rows(block.get_submodule(name.rpartition(".")[0]), kept[name])

        for name, parameter in block.named_parameters():
            edited = residual.edited(name, load, rotation, head_rotation)
            as_rows(block.get_submodule(name.rpartition(".")[0]), parameter.data).copy_(edited)
        after = call.run(block, rotation.apply(hidden))
    return _same(after, before)


def _outer_commutes(skeleton: Skeleton, residual: OuterResidual) -> bool:
    model, width = skeleton.model, skeleton.hidden_size
    generator = torch.Generator().manual_seed(6)
    embedded = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    leaving = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    rotation = Rotation.random(width, generator, keep_ones=residual.centred)

    def run(entering: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the first block and what the head reads."""
        first: list[Tensor] = []
        last = _Recorder()

        def answer(hidden: Tensor) -> Tensor:
            first.append(hidden)
            return result

        with head_replaced(skeleton, last), stubbed(skeleton, answer):
            model(inputs_embeds=entering, use_cache=False)
        return first[0], last.seen[0]

    first, last = run(embedded, leaving)
    gain = None
    if residual.norm is not None:
        norm = model.get_submodule(residual.norm)
        gain = norm.weight.detach().clone()  # type: ignore[union-attr, operator]
        for leaf, parameter in list(norm.named_parameters()):
            set_tensor(
                model, f"{residual.norm}.{leaf}", folded_norm(parameter.data, leaf, gain, residual.offset, rotation)
            )
        last = last / (gain + residual.offset)
    for table in residual.tables:
        set_tensor(model, table, rotation.apply(model.get_parameter(table).data))
    rotated_first, rotated_last = run(rotation.apply(embedded), rotation.apply(leaving))
    return _same(rotated_first, rotation.apply(first)) and _same(rotated_last, rotation.apply(last))


class _Recorder(nn.Module):
    """Stands in for the head and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.float64), requires_grad=False)
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden)
        return hidden


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _random(parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel())
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return noise if parameter.dim() > 1 else 1 + 0.1 * noise
