"""A mixture with only some of its experts, without a copy on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ...models.checkpoint.weights import ChangedWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.experts import SplitExperts
from ...models.structure.open_model import OpenModel
from ...models.structure.skeleton import Skeleton
from ...system.errors import SmeltError
from ...system.storage.tensor_files import TensorInfo

# Configuration fields of the number of routed experts per layer.
_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ExpertLayers:
    """Where a model's experts are.

    Attributes:
        field: the field of ``config.json`` with their number.
        count: experts per layer.
        chosen: experts per token.
        modules: by block, the full name of the module that holds them.
        routing: by full name, parameters with an entry for each expert, and the dimension of these entries.
    """

    field: str
    count: int
    chosen: int
    modules: dict[int, str]
    routing: dict[str, int]

    @classmethod
    def find(cls, model: OpenModel) -> ExpertLayers:
        """Find them.

        Raises:
            SmeltError: the model has none, or their layout is not supported.
        """
        kind, stored = model.architecture, model.config.to_dict()
        modules = {
            index: f"{anatomy.name}.{path}"
            for index, anatomy in enumerate(model.anatomy.blocks)
            for path, module in model.skeleton.blocks[index].named_modules()
            if isinstance(module, SplitExperts)
        }
        if model.skeleton.fused_experts:
            raise SmeltError(f"{kind}: its experts have an unknown layout, so they cannot be pruned")
        field = next((name for name in _NAMES if isinstance(stored.get(name), int)), None)
        if not modules or field is None:
            raise SmeltError(f"{kind}: has no mixture of experts; prune other structures")
        count = stored[field]
        if any(len(_experts(model, path)) != count for path in modules.values()):
            raise SmeltError(
                f"{kind}: its layers do not have {count} experts each, as {field} says; they cannot be pruned"
            )
        per_token = getattr(model.config, "num_experts_per_tok", None) or getattr(model.config, "moe_topk", 1)
        found = cls(field, count, per_token, modules, {})
        return replace(found, routing=found._routing(model))

    def with_count(self, directory: ModelDirectory, count: int) -> ModelDirectory:
        """A model directory with this number in its configuration."""
        return directory.changed({self.field: count})

    def _routing(self, model: OpenModel) -> dict[str, int]:
        kind = model.architecture
        try:
            smaller = Skeleton.of(self.with_count(model.directory, self.count - 1)).parameters()
        except SmeltError as error:
            raise SmeltError(f"{kind}: {self.field} cannot be made smaller ({error})") from None
        found = dict[str, int]()
        for name, parameter in model.skeleton.parameters().items():
            if name not in smaller:
                continue  # the last expert's
            changed = [d for d in range(parameter.dim()) if parameter.shape[d] != smaller[name].shape[d]]
            if not changed:
                continue
            if len(changed) > 1 or parameter.shape[changed[0]] != self.count:
                raise SmeltError(f"{kind}: {self.field} changes {name} in a way that Smelt does not follow")
            found[name] = changed[0]
        return found


def drop_experts(model: OpenModel, layers: ExpertLayers, kept: Mapping[int, Tensor], count: int) -> OpenModel:
    """The model with only some experts.

    Args:
        model: the whole model.
        layers: where the experts are.
        kept: those to keep, by block, in order; looked up when a tensor is read, so it may be filled in later.
        count: the number kept in each block.
    """
    weights = _FewerExperts(model, layers, kept, count)
    return OpenModel(layers.with_count(model.directory, count), weights, is_edited=model.is_edited)


def _experts(model: OpenModel, path: str) -> SplitExperts:
    module = model.skeleton.model.get_submodule(path)
    assert isinstance(module, SplitExperts)
    return module


class _FewerExperts(ChangedWeights):
    """The tensors of the kept experts, renumbered, and all others."""

    def __init__(self, model: OpenModel, layers: ExpertLayers, kept: Mapping[int, Tensor], count: int) -> None:
        super().__init__(model.weights)
        self._kept, self._count = kept, count
        block_of = {f"{path}.": index for index, path in layers.modules.items()}
        # By checkpoint name of an expert's tensor: its block and its names in all experts.
        self._every: dict[str, tuple[int, list[str], int]] = {}
        gone: set[str] = set()
        for name, key in model.names.items():
            path = next((path for path in block_of if name.startswith(path)), None)
            number, _, rest = name.removeprefix(path or "").partition(".")
            if path is None or not number.isdigit():
                continue
            if int(number) >= count:
                gone.add(key)
            else:
                keys = [model.names[f"{path}{each}.{rest}"] for each in range(layers.count)]
                self._every[key] = (block_of[path], keys, int(number))
        blocks = {f"{anatomy.name}.": index for index, anatomy in enumerate(model.anatomy.blocks)}
        self._routing = {
            model.names[name]: (next(i for start, i in blocks.items() if name.startswith(start)), dim)
            for name, dim in layers.routing.items()
        }
        self._names = [key for key in self._source.names() if key not in gone]

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if name not in self._routing:
            return info
        _, dim = self._routing[name]
        return TensorInfo(info.dtype, (*info.shape[:dim], self._count, *info.shape[dim + 1 :]))

    def load(self, name: str) -> Tensor:
        if name in self._every:
            block, keys, number = self._every[name]
            return self._source.load(keys[int(self._kept[block][number])])
        tensor = self._source.load(name)
        if name in self._routing:
            block, dim = self._routing[name]
            return tensor.index_select(dim, self._kept[block].to(tensor.device)).contiguous()
        return tensor
