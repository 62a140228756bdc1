"""The widths of a model that can be made smaller: feed-forward channels, attention heads, hidden channels.

What depends on a width is found, not hard-coded: two skeletons are built on the meta device, one of them with
a slightly smaller width, and their parameters' shapes are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import LAYER_SIZES, config_fields
from ...models.structure.open_model import OpenModel
from ...models.structure.skeleton import Skeleton
from ...system.errors import SmeltError

# Configuration fields of the feed-forward width, an expert's before a whole layer's.
_CHANNELS = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
# Multiples of widths that suit kernels and groups of scales.
_MULTIPLE, _SMALL_MULTIPLE, _SMALL = 64, 8, 512
_LESS = 16


class _NothingReadsError(SmeltError):
    """A configuration field has no effect on a model."""


@dataclass(frozen=True)
class Span:
    """The position of an axis's units in a parameter: in one dimension, part after part.

    Attributes:
        dim: the dimension.
        parts: entries per unit in each part; each part holds all units, one after another.
    """

    dim: int
    parts: tuple[int, ...]

    def places(self, units: int, kept: Tensor) -> Tensor:
        """The entries of some of ``units`` units, in the order of the smaller parameter."""
        found, start = [], 0
        for size in self.parts:
            found.append((start + kept[:, None] * size + torch.arange(size, device=kept.device)).flatten())
            start += units * size
        return torch.cat(found)


@dataclass(frozen=True)
class Axis:
    """A width that can be made smaller.

    Attributes:
        noun: name of its units, plural.
        units: their number.
        multiple: the smaller number must be a multiple of it.
        fields: fields of ``config.json`` that count them, with the count per unit.
        pinned: fields that must be set so that nothing else depends on the smaller number.
        readers: by the full name of each linear that reads its own units: all parameters that hold those.
    """

    noun: str
    units: int
    multiple: int
    fields: Mapping[str, int]
    readers: Mapping[str, Mapping[str, Span]]
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def in_multiples_of(self, multiple: int | None) -> Axis:
        """The same with another multiple, if one is given."""
        return self if multiple is None else replace(self, multiple=multiple)

    @property
    def columns(self) -> int:
        """Columns of its reader per unit."""
        reader, spans = next(iter(self.readers.items()))
        return spans[f"{reader}.weight"].parts[0]

    def columns_of(self, units: Tensor) -> Tensor:
        """The reader's columns of some units."""
        return (units[:, None] * self.columns + torch.arange(self.columns, device=units.device)).flatten()

    def of_block(self, name: str) -> list[str]:
        """The readers in a block."""
        return [reader for reader in self.readers if reader.startswith(f"{name}.")]

    def left(self, ratio: float) -> int:
        """How many are kept if a share is removed."""
        return round(self.units * (1 - ratio) / self.multiple) * self.multiple

    def with_units(self, directory: ModelDirectory, units: int) -> ModelDirectory:
        """A model directory with this number in its configuration."""
        return directory.changed({**self.pinned, **self._counted(units)})

    def with_units_of_blocks(self, directory: ModelDirectory, units: Sequence[int]) -> ModelDirectory:
        """A model directory with these numbers by block; only loaders that know ``layer_sizes`` can load it."""
        known = directory.config_data().get(LAYER_SIZES) or [{}] * len(units)
        sizes = [{**other, **self._counted(own)} for other, own in zip(known, units, strict=True)]
        return self.with_units(directory, max(units)).changed(config_fields(sizes))

    def _counted(self, units: int) -> dict[str, int]:
        return {name: units * each for name, each in self.fields.items()}


def feed_forward(model: OpenModel, *, alike: bool = True) -> Axis:
    """The channels of feed-forward layers; for experts, each expert's own.

    Args:
        model: the model.
        alike: whether to refuse blocks that differ in them; if not, only the names in the result are valid.

    Raises:
        SmeltError: the model has none, or their number cannot be changed.
    """
    stored, refused = model.config.to_dict(), None
    for name in _CHANNELS:
        width = stored.get(name, 0)
        if width is None and name == "n_inner":  # in GPT-2, four times the hidden size
            width = 4 * model.skeleton.hidden_size
        if not isinstance(width, int) or width == 0:
            continue
        try:
            if width <= _LESS:
                raise SmeltError(
                    f"{model.architecture}: its feed-forward layers have {width} channels, too few to prune"
                )
            multiple = _SMALL_MULTIPLE if width < _SMALL else _MULTIPLE
            axis = Axis("feed-forward channels", width, multiple, {name: 1}, {})
            if alike:
                _check_alike(model, axis)
            return _without_norms(model, replace(axis, readers=_grouped(model, axis, _LESS)))
        except _NothingReadsError as error:  # a field that this architecture only inherits
            refused = refused or error
    raise refused or SmeltError(
        f"{model.architecture}: config.json does not give the number of feed-forward channels ({', '.join(_CHANNELS)}), so they"
        " cannot be pruned"
    )


def heads(model: OpenModel) -> Axis:
    """Attention heads; a unit is a key-value head with all its query heads.

    Raises:
        SmeltError: their number cannot be changed independently.
    """
    config = model.config
    queries = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or queries
    if not isinstance(queries, int) or not isinstance(groups, int):
        raise SmeltError(
            f"{model.architecture}: config.json does not give the number of attention heads, so they cannot be pruned"
        )
    if queries % groups:
        raise SmeltError(
            f"{model.architecture}: {queries} query heads do not divide by {groups} key-value heads, so no whole"
            " group can be pruned"
        )
    if groups == 1:
        raise SmeltError(
            f"{model.architecture}: all its query heads share one key-value head, which cannot be pruned;"
            " prune other structures"
        )
    fields = {_spelled(model, "num_attention_heads"): queries // groups}
    if getattr(config, "num_key_value_heads", None) is not None:
        fields["num_key_value_heads"] = 1
    size = getattr(config, "head_dim", None) or model.skeleton.hidden_size // queries
    axis = Axis("groups of attention heads", groups, 1, fields, {}, {"head_dim": size})
    _check_alike(model, axis)
    return _without_norms(model, replace(axis, readers=_grouped(model, axis, _possible_loss(model, axis))))


def _without_norms(model: OpenModel, axis: Axis) -> Axis:
    """The axis, unless a norm takes its units together: what is left of them would be scaled otherwise."""
    for spans in axis.readers.values():
        for name in spans:
            module, _, kind = name.rpartition(".")
            if kind == "weight" and model.skeleton.model.get_parameter(name).dim() == 1:
                raise SmeltError(
                    f"{model.architecture}: {module} norms {axis.noun} together, so that without some of them it would scale the others"
                    " otherwise; prune other structures"
                )
    return axis


def hidden(model: OpenModel) -> Axis:
    """Channels of the residual stream, common to all parameters that read or write it.

    Raises:
        SmeltError: their number cannot be changed independently.
    """
    config, width = model.config, model.skeleton.hidden_size
    queries = getattr(config, "num_attention_heads", None)
    pinned: dict[str, Any] = {}
    if isinstance(queries, int):
        pinned["head_dim"] = getattr(config, "head_dim", None) or width // queries
    multiple = _SMALL_MULTIPLE if width < _SMALL else _MULTIPLE
    if width <= multiple:
        raise SmeltError(f"{model.architecture}: its residual stream has {width} channels, too few to prune")
    axis = Axis("channels of the residual stream", width, multiple, {_spelled(model, "hidden_size"): 1}, {}, pinned)
    spans = _changing(model, axis, _possible_loss(model, axis))
    embedding = f"{model.skeleton.embedding_name}.weight"
    if embedding not in spans:
        raise SmeltError(
            f"{model.architecture}: {embedding} does not follow hidden_size, so {axis.noun} cannot be pruned"
        )
    return replace(axis, readers={"": spans})


def vocabulary(model: OpenModel) -> Axis:
    """Tokens: rows of the embedding and lm_head.

    Raises:
        SmeltError: their number cannot be changed independently.
    """
    named = {
        name: None for name, value in model.directory.config_data().items() if name.endswith("_token_id") and value
    }
    axis = Axis("tokens", model.vocabulary(), 1, {_spelled(model, "vocab_size"): 1}, {}, named)
    spans = _changing(model, axis, 1)
    if f"{model.skeleton.embedding_name}.weight" not in spans:
        raise SmeltError(
            f"{model.architecture}: its embedding does not follow vocab_size, so {axis.noun} cannot be pruned"
        )
    return replace(axis, readers={"": spans})


def possible_units(model: OpenModel, axis: Axis) -> list[int]:
    """The smaller numbers that the architecture's configuration allows."""
    numbers = range(axis.multiple, axis.units, axis.multiple)
    return [units for units in numbers if is_possible(model, axis, units)]


def is_possible(model: OpenModel, axis: Axis, units: int) -> bool:
    """Whether the architecture's configuration allows this number."""
    try:
        Skeleton.of(axis.with_units(model.directory, units))
    except SmeltError:
        return False
    return True


def _possible_loss(model: OpenModel, axis: Axis) -> int:
    """The fewest that can be removed: some configurations need a hidden size divisible by the number of heads."""
    for less in range(axis.multiple, axis.units, axis.multiple):
        if is_possible(model, axis, axis.units - less):
            return less
    raise SmeltError(
        f"{model.architecture}: its configuration allows no smaller {' and '.join(axis.fields)}; prune other structures"
    )


def _grouped(model: OpenModel, axis: Axis, less: int) -> dict[str, dict[str, Span]]:
    """The parameters that change with the number of units, by the linear that reads them."""
    spans = _changing(model, axis, less)
    readers = [
        name.removesuffix(".weight")
        for name, span in spans.items()
        if name.endswith(".weight") and len(span.parts) == 1 and _is_column(model, name, span.dim)
    ]
    if not readers:
        names = ", ".join(axis.fields)
        raise _NothingReadsError(
            f"{model.architecture}: no linear's inputs change with {names}, so {axis.noun} cannot be pruned"
        )
    found: dict[str, dict[str, Span]] = {reader: {} for reader in readers}
    for name, span in spans.items():
        near = [reader for reader in readers if name.startswith(f"{reader.rpartition('.')[0]}.")]
        if not near:
            raise SmeltError(f"{model.architecture}: {name} has {axis.noun} that no linear beside it reads")
        found[max(near, key=len)][name] = span
    counts = {len(of) for of in found.values()}
    per_unit = {spans[f"{reader}.weight"].parts[0] for reader in readers}
    if len(per_unit) > 1 or min(counts) < 2:
        raise SmeltError(
            f"{model.architecture}: its layers differ in their {axis.noun} in a way that Smelt does not follow"
        )
    return found


def _check_alike(model: OpenModel, axis: Axis) -> None:
    """Check that no earlier step left different numbers of units in blocks."""
    if _differs(model, axis):
        raise SmeltError(
            f"{model.architecture}: its blocks differ in their {axis.noun} already ({LAYER_SIZES} in config.json), so they cannot"
            " be pruned again; prune them in one step"
        )


def _differs(model: OpenModel, axis: Axis) -> bool:
    sizes = getattr(model.config, LAYER_SIZES, None) or []
    return any(name in each for each in sizes for name in axis.fields)


def _changing(model: OpenModel, axis: Axis, less: int) -> dict[str, Span]:
    """Every parameter whose shape depends on the number of units."""
    directory, whole = model.directory, model.skeleton
    if _differs(model, axis):  # different numbers by block hide which shapes depend on them
        directory = directory.changed({LAYER_SIZES: None})
        whole = Skeleton.of(directory)
    try:
        smaller = Skeleton.of(axis.with_units(directory, axis.units - less)).parameters()
    except SmeltError as error:
        raise SmeltError(
            f"{model.architecture}: {', '.join(axis.fields)} cannot be made smaller by {less} ({error})"
        ) from None
    found: dict[str, Span] = {}
    sizes: dict[str, tuple[int, int]] = {}
    query_heads = max(axis.fields.values())
    for name, parameter in whole.parameters().items():
        changed = [d for d in range(parameter.dim()) if parameter.shape[d] != smaller[name].shape[d]]
        if not changed:
            continue
        before, after = parameter.shape[changed[0]], smaller[name].shape[changed[0]]
        size, rest = divmod(before - after, less)
        if len(changed) > 1 or rest or size * axis.units != before:
            raise SmeltError(
                f"{model.architecture}: {', '.join(axis.fields)} changes {name} in a way that Smelt does not follow"
            )
        sizes[name] = changed[0], size
    # Queries, keys and values may be fused in one matrix: then it is the only one that computes heads.
    head = axis.pinned.get("head_dim")
    making = Counter(_place(name) for name, (dim, _) in sizes.items() if name.endswith(".weight") and dim == 0)
    for name, (dim, size) in sizes.items():
        if head is None:
            parts = (1,) * size
        elif size == (query_heads + 2) * head and making[_place(name)] == 1:
            parts = (query_heads * head, head, head)
        else:
            parts = (size,)
        found[name] = Span(dim, parts)
    return found


def _place(parameter: str) -> str:
    """The module that holds the module of a parameter."""
    return parameter.rpartition(".")[0].rpartition(".")[0]


def _is_column(model: OpenModel, name: str, dim: int) -> bool:
    """Whether this dimension of a linear's weight is its inputs; in GPT-2's Conv1D that is the first."""
    label = name.removesuffix(".weight")
    return label in model.linears and dim == (0 if model.linears[label].kind == "Conv1D" else 1)


def _spelled(model: OpenModel, name: str) -> str:
    return model.config.attribute_map.get(name, name)
