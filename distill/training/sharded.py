"""Training over several processes: each reads its part of a batch and keeps its shard of the weights.

It uses torch's FSDP2 (``fully_shard``), which gathers a block's weights when they are needed and reduces its gradients.
Weights have ``replicas`` copies, each sharded over ``count / replicas`` processes: one copy per process is
DistributedDataParallel, a single copy is fully sharded, and anything between is hybrid sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .batches import TrainingBatch
from .optimizer import Rows, Trained, own

T = TypeVar("T")


class ShardedModule(nn.Module):
    """Student or teacher as one module; within a call of it, sharded weights are gathered.

    Args:
        parts: models and other trained modules.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, work: Callable[[], T]) -> T:
        """Run ``work`` with the weights."""
        return work()


class Sharding:
    """How a training is distributed over processes; this base class runs in one process.

    Attributes:
        rank: this process's rank.
        count: number of processes.
        shards: number of processes over which each copy of the weights is sharded.
    """

    rank, count, shards = 0, 1, 1

    @property
    def keeps(self) -> str | None:
        """The name of this process's part of a snapshot; None if another process has the same."""
        return "0"

    def share(self, batch: TrainingBatch) -> TrainingBatch:
        """This process's windows of a batch, at least one."""
        return batch

    def first_window(self, windows: int) -> int:
        """The index in a batch of ``windows`` at which this process's share starts."""
        return 0

    def sums(self, numbers: Iterable[float]) -> list[float]:
        """Numbers summed over all processes."""
        return list(numbers)

    def mean_(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their mean over all processes."""

    def over(
        self, stage: ShardedModule, blocks: Iterable[nn.Module], trained: Mapping[str, Trained]
    ) -> dict[str, Trained]:
        """Shard a stage's weights.

        Args:
            stage: the module to shard.
            blocks: its parts that run one after another.
            trained: its parameters that are trained, by name; none for a teacher.

        Returns:
            This process's part of the same parameters.
        """
        return dict(trained)

    @contextmanager
    def whole(self, stage: ShardedModule) -> Iterator[None]:
        """Within it, all weights are unsharded, for reading."""
        yield

    def gathered(self, pieces: Mapping[str, Tensor], trained: Mapping[str, Trained]) -> dict[str, Tensor]:
        """Unsharded tensors, in the first process; the others get none."""
        return {name: each.detach() for name, each in pieces.items()}

    def undone(self, stage: ShardedModule) -> None:
        """Give the first process the stage's unsharded weights, in main memory; the stage cannot run afterwards."""


class SpreadOver(Sharding):
    """A training distributed over the processes of torch's default group.

    Args:
        device: of this process.
        replicas: number of copies of the weights; it divides the number of processes.
        reshard: free weights of blocks after each pass and gather them again for gradients: saves memory, costs time.
    """

    def __init__(self, device: torch.device, replicas: int, *, reshard: bool = True) -> None:
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        self.shards = self.count // replicas
        self._device, self._replicas, self._reshard = device, replicas, reshard
        shape, names = ((self.shards,), ("shard",)) if replicas == 1 else ((replicas, self.shards), ("copy", "shard"))
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self._in_all: set[nn.Parameter] = set()

    @property
    def keeps(self) -> str | None:
        return f"{self.rank}" if self.rank < self.shards else None

    def share(self, batch: TrainingBatch) -> TrainingBatch:
        return batch.parts(self.count)[self.rank]

    def first_window(self, windows: int) -> int:
        return sum(len(each) for each in torch.arange(windows).tensor_split(self.count)[: self.rank])

    def sums(self, numbers: Iterable[float]) -> list[float]:
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        distributed.all_reduce(total)
        return total.tolist()

    def mean_(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([each.flatten() for each in tensors]).div_(self.count)
        distributed.all_reduce(flat)
        for each, found in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            each.copy_(found.view_as(each))

    def over(
        self, stage: ShardedModule, blocks: Iterable[nn.Module], trained: Mapping[str, Trained]
    ) -> dict[str, Trained]:
        home = {id(p): (m, leaf) for m in stage.modules() for leaf, p in m._parameters.items() if p is not None}
        homes = {name: home[id(each.parameter)] for name, each in trained.items()}
        for block in blocks:
            self._spread(block, self._reshard)
        root = self._spread(stage, False)
        if adds_up_unused():  # of experts without tokens
            root.set_reduce_scatter_unused_params(True)
        if trained:  # a teacher's never change
            stage.register_forward_hook(_give_up_if_read_only)
        with torch.no_grad():
            stage(lambda: None)  # FSDP takes the first module called as its root
        return {name: self._here(each, *homes[name]) for name, each in trained.items()}

    @contextmanager
    def whole(self, stage: ShardedModule) -> Iterator[None]:
        spread = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in spread:
            module.unshard()
        try:
            yield
        finally:
            for module in spread:
                module.reshard()

    def gathered(self, pieces: Mapping[str, Tensor], trained: Mapping[str, Trained]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, piece in pieces.items():
            parameter, tensor = trained[name].parameter, piece.detach()
            if isinstance(parameter, DTensor):
                spread = DTensor.from_local(
                    tensor,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                tensor = spread.full_tensor()
            if self.rank == 0:
                found[name] = tensor.cpu()
        return found

    @torch.no_grad()
    def undone(self, stage: ShardedModule) -> None:
        for module in stage.modules():
            for leaf, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    whole = parameter.full_tensor().cpu()
                    module._parameters[leaf] = nn.Parameter(whole, requires_grad=False) if self.rank == 0 else None

    def _spread(self, module: nn.Module, reshard: bool) -> Any:
        """Shard what is not sharded yet. Parameters of another dtype than most, such as some norms, stay whole."""
        left = [p for p in module.parameters() if not isinstance(p, DTensor) and p not in self._in_all]
        sizes: dict[torch.dtype, int] = {}
        for each in left:
            if each.requires_grad:
                sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel()
        usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        apart = {p for p in left if (p.requires_grad and p.dtype != usual) or p.dim() == 0}
        for each in apart:
            each.data = each.data.to(self._device)
        self._in_all |= apart
        # Gradients are reduced in float32, whatever their dtype.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        return fully_shard(
            module, mesh=self._mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=self._in_all
        )

    def _here(self, trained: Trained, module: nn.Module, leaf: str) -> Trained:
        parameter = module._parameters[leaf]
        assert parameter is not None
        if not isinstance(parameter, DTensor):
            return replace(trained, parameter=parameter, copies=self.count)
        total, kept = parameter.shape[0], len(own(parameter))
        start = min(total, self.rank % self.shards * -(-total // self.shards))
        stays = None if trained.stays is None else trained.stays[start : start + kept].to(self._device)
        rows = Rows(start, start + kept, total)
        return replace(trained, parameter=parameter, stays=stays, rows=rows, copies=self._replicas)


def adds_up_unused() -> bool:
    """Whether torch reduces gradients of parameters used by only some processes (since 2.13)."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _give_up_if_read_only(stage: nn.Module, _args: object, _output: object) -> None:
    # Only a backward pass reshards the root's weights, which would be stale after the next step.
    if not torch.is_grad_enabled():
        assert isinstance(stage, FSDPModule)
        stage.reshard()
