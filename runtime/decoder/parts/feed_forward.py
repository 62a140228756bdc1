"""The feed-forward part of a layer: gated, plain, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linears.linear import Linear
from .operators import Experts, Rowwise


class GatedFeedForward:
    """An activated gate times the up projection.

    Args:
        gate_up: both, stacked.
        down: applied to their product.
        gate: computes that product; None if ``gate_up`` returns it already.
    """

    def __init__(self, gate_up: Linear, down: Linear, gate: Rowwise | None) -> None:
        self.gate_up, self.down, self.gate = gate_up, down, gate

    def __call__(self, hidden: Tensor) -> Tensor:
        inner = self.gate_up(hidden)
        return self.down(inner if self.gate is None else self.gate(inner))

    def linears(self) -> dict[str, Linear]:
        """Its linears, by role."""
        return {"gate, up": self.gate_up, "down": self.down}


class PlainFeedForward:
    """Two linears with an activation between them.

    Args:
        up: the first.
        down: the second.
        activation: None if ``up`` applies it already.
    """

    def __init__(self, up: Linear, down: Linear, activation: Rowwise | None) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden)
        return self.down(inner if self.activation is None else self.activation(inner))

    def linears(self) -> dict[str, Linear]:
        """Its linears, by role."""
        return {"up": self.up, "down": self.down}


@dataclass(frozen=True)
class ExpertChoice:
    """Sends each token to a few experts.

    Attributes:
        router: scores each expert for a token.
        per_token: experts of a token.
        normalized: whether the chosen experts' weights are normalized to sum to one.
    """

    router: Rowwise
    per_token: int
    normalized: bool

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and which they are."""
        shares, chosen = self.router(hidden).float().softmax(-1).topk(self.per_token, dim=-1)
        if self.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(hidden.dtype), chosen


class RoutedFeedForward:
    """A mixture of experts: a router sends each token to a few of many feed-forward parts.

    Args:
        choose: the experts of each token.
        together: computes all experts at once, where supported.
        experts: the experts one by one, otherwise.
    """

    def __init__(self, choose: ExpertChoice, together: Experts | None, experts: list[GatedFeedForward]) -> None:
        self._choose, self._together, self._experts = choose, together, experts

    @property
    def waits(self) -> bool:
        """Whether the host must wait to learn which experts were chosen."""
        return self._together is None

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, chosen = self._choose(hidden)
        if self._together is not None:
            return self._together(hidden, chosen, shares)
        out = torch.zeros_like(hidden)
        for e in chosen.unique().tolist():
            tokens, place = torch.where(chosen == e)
            out.index_add_(0, tokens, self._experts[e](hidden[tokens]) * shares[tokens, place, None])
        return out

    def linears(self) -> dict[str, Linear]:
        """Each expert's linears, by role."""
        if self._together is not None:
            return self._together.linears()
        return {
            f"expert {e} {role}": m for e, expert in enumerate(self._experts) for role, m in expert.linears().items()
        }
