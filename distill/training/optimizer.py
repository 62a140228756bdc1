"""AdamW on float32 master weights of parameters that the model may hold in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .small_states import SmallStatesAdamW

_BETAS, _EPSILON = (0.9, 0.95), 1e-8


class Rows(NamedTuple):
    """The rows of a tensor that a process keeps: those from ``start`` to ``stop`` of ``total``."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained.

    Attributes:
        parameter: the model's own.
        rate: its learning rate, relative to the run's.
        decays: whether weight decay applies to it.
        stays: mask of its elements that may change; None for all. The others stay zero.
        rows: the rows that this process keeps; None for all.
        copies: number of processes that keep the same part of it.
    """

    parameter: nn.Parameter
    rate: float = 1.0
    decays: bool = True
    stays: Tensor | None = None
    rows: Rows | None = None
    copies: int = 1


class GradientGroup(Protocol):
    """The processes that an optimizer shares its gradients with."""

    def sums(self, numbers: Iterable[float]) -> list[float]:
        """Numbers summed over all of them."""
        ...

    def mean_(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their mean over all of them."""
        ...


# Reads a tensor of a snapshot, or some of its rows; None if it does not exist.
Saved = Callable[[str, Rows | None], Tensor | None]


class MasterAdamW:
    """AdamW whose moments and weights are float32, whatever the model's dtype.

    A bfloat16 weight of 1 cannot change by less than 1/256: steps accumulate in a master weight, and the model gets it
    rounded. Gradients of several passes are accumulated in float32, too.

    Args:
        trained: by name.
        decay: weight decay, for those that decay.
        small_states: use 8-bit moments.
        others: processes that train the same parameters; None if alone.
    """

    def __init__(
        self,
        trained: Mapping[str, Trained],
        decay: float,
        *,
        small_states: bool = False,
        others: GradientGroup | None = None,
    ) -> None:
        self._trained, self._others = dict(trained), others
        self.masters = {name: _master(each.parameter) for name, each in trained.items()}
        groups = [
            {
                "params": [self.masters[name] for name, each in trained.items() if (each.rate, each.decays) == kind],
                "weight_decay": decay if kind[1] else 0.0,
                "factor": kind[0],
            }
            for kind in dict.fromkeys((each.rate, each.decays) for each in trained.values())
        ]
        kind = SmallStatesAdamW if small_states else _FusedAdamW
        self._adam = kind(groups, lr=0.0, betas=_BETAS, eps=_EPSILON)

    @torch.no_grad()
    def collect(self) -> None:
        """Move the parameters' gradients to those of the master weights, adding up."""
        for name, each in self._trained.items():
            gradient, master = each.parameter.grad, self.masters[name]
            if gradient is None or master is each.parameter:
                continue
            each.parameter.grad = None
            gradient = own(gradient)
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad += gradient

    @torch.no_grad()
    def clip(self, limit: float | None) -> float:
        """Clip gradients to a norm of at most ``limit``; returns the norm before.

        Gradients of weights that stay zero are zero, and do not count.
        """
        for master in self.masters.values():
            if master.grad is None:  # an expert without tokens gets zeros, as in processes whose tokens reach it
                master.grad = torch.zeros_like(master)
        self._share()
        for name, each in self._trained.items():
            gradient = self.masters[name].grad
            if each.stays is not None and gradient is not None:
                gradient.mul_(each.stays)
        gradients = [each.grad for each in self.masters.values() if each.grad is not None]
        if not gradients:
            return 0.0
        norm = self._norm() if self._others else float(torch.nn.utils.get_total_norm(gradients))
        if limit is not None and norm > limit:
            for each in gradients:
                each.mul_(limit / norm)
        return norm

    def _share(self) -> None:
        """Average the gradients of unsharded parameters over all processes."""
        if self._others is None:
            return
        whole = [self.masters[name] for name, each in self._trained.items() if each.rows is None]
        self._others.mean_([master.grad for master in whole if master.grad is not None])

    def _norm(self) -> float:
        assert self._others is not None
        squares = 0.0
        for copies in {each.copies for each in self._trained.values()}:
            masters = [self.masters[name] for name, each in self._trained.items() if each.copies == copies]
            found = [master.grad for master in masters if master.grad is not None]
            squares += float(torch.nn.utils.get_total_norm(found)) ** 2 / copies if found else 0.0
        return self._others.sums([squares])[0] ** 0.5

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters and clear their gradients."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
        self._adam.step()
        self.forget()
        self._hand_down()

    def forget(self) -> None:
        """Clear the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Master weights and moments, as tensors by name: all that a rerun needs. Shards, if sharded."""
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            in_pieces = self._trained[name].rows is not None
            found |= {f"{key}.{name}": value for key, value in self._adam.moments(master, plain=in_pieces).items()}
        return found

    def rows(self, key: str) -> Rows | None:
        """The rows of one of :meth:`state`'s tensors that this process has; None for all."""
        kind, _, name = key.partition(".")
        return None if kind == "step" else self._trained[name].rows

    @torch.no_grad()
    def load(self, saved: Saved) -> None:
        """Continue from a saved :meth:`state`, of this or other processes."""
        for name, master in self.masters.items():
            rows = self._trained[name].rows
            wanted = saved(f"master.{name}", rows)
            assert wanted is not None
            master.copy_(wanted)

            def read(key: str, rows: Rows | None, name: str = name) -> Tensor | None:
                return saved(f"{key}.{name}", rows)

            self._adam.go_on(master, read, rows)
        self._hand_down()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Replace master weights and parameters."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self._hand_down()

    @torch.no_grad()
    def _hand_down(self) -> None:
        for name, each in self._trained.items():
            mine, master = own(each.parameter), self.masters[name]
            if mine.data_ptr() != master.data_ptr():
                mine.copy_(master)


class _FusedAdamW(torch.optim.AdamW):
    def __init__(self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def moments(self, parameter: Tensor, *, plain: bool) -> dict[str, Tensor]:
        """The moments of a parameter."""
        return dict(self.state.get(parameter, {}))

    def go_on(self, parameter: Tensor, read: Saved, rows: Rows | None) -> None:
        """Restore saved moments."""
        found = {key: read(key, None if key == "step" else rows) for key in ("step", "exp_avg", "exp_avg_sq")}
        kept = {key: value.to(parameter.device, copy=True) for key, value in found.items() if value is not None}
        if kept:
            self.state[parameter] = kept


def own(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _master(parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor):
        return own(parameter.detach()).float().requires_grad_()
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
