"""AdamW on float32 masters of parameters that the model may hold in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .small_states import SmallStatesAdamW

_BETAS, _EPSILON = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained.

    Attributes:
        parameter: as the model computes with it.
        rate: its learning rate, as a factor of the run's.
        decays: whether weight decay acts on it.
        stays: which of its numbers may change; None for all. The others are zero and stay so.
    """

    parameter: nn.Parameter
    rate: float = 1.0
    decays: bool = True
    stays: Tensor | None = None


class MasterAdamW:
    """AdamW whose moments and weights are float32, whatever the model computes in.

    A bfloat16 weight of 1 cannot move by less than 1/256: steps are summed up in a master, and the model is given it
    rounded. Gradients of several passes are summed up in float32, too.

    Args:
        trained: by name.
        decay: weight decay, for those that decay.
        small_states: keep moments in eight bits.
    """

    def __init__(self, trained: Mapping[str, Trained], decay: float, *, small_states: bool = False) -> None:
        self._trained = dict(trained)
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
        """Add the parameters' gradients to those of the masters, and drop them."""
        for name, each in self._trained.items():
            gradient, master = each.parameter.grad, self.masters[name]
            if gradient is None or master is each.parameter:
                continue
            each.parameter.grad = None
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad += gradient

    @torch.no_grad()
    def clip(self, limit: float | None) -> float:
        """Scale gradients down to a norm of at most ``limit``; gives the norm that they had.

        Those of weights that stay zero are zero, and do not count.
        """
        for name, each in self._trained.items():
            gradient = self.masters[name].grad
            if each.stays is not None and gradient is not None:
                gradient.mul_(each.stays)
        gradients = [each.grad for each in self.masters.values() if each.grad is not None]
        if not gradients:
            return 0.0
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if limit is not None and norm > limit:
            for each in gradients:
                each.mul_(limit / norm)
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Change the parameters by their gradients, which are dropped."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
        self._adam.step()
        self.forget()
        self._hand_down()

    def forget(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments, as tensors by name: all that a rerun needs."""
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            found |= {f"{key}.{name}": value for key, value in self._adam.state.get(master, {}).items()}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        for name, master in self.masters.items():
            master.copy_(state[f"master.{name}"])
            moments = {key: state[f"{key}.{name}"] for key in self._adam.kept if f"{key}.{name}" in state}
            if moments:
                self._adam.state[master] = {key: value.to(master.device, copy=True) for key, value in moments.items()}
        self._hand_down()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Give masters and parameters other weights."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self._hand_down()

    @torch.no_grad()
    def _hand_down(self) -> None:
        for name, each in self._trained.items():
            if self.masters[name] is not each.parameter:
                each.parameter.copy_(self.masters[name])


class _FusedAdamW(torch.optim.AdamW):
    kept = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
