"""A mixture whose experts are divided between ranks: tokens travel to their experts, and the results back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ...parallel.ranks import Ranks
from ..linears.linear import Linear
from ..parts.feed_forward import ExpertChoice, GatedFeedForward


class DividedExperts:
    """Each rank routes its share of a step's tokens, which all ranks have; two all-to-alls and a gather.

    Args:
        choose: the experts of each token.
        experts: this rank's, by number.
        begins: where each rank's experts begin, and the last one's end.
        ranks: that have the others.
    """

    def __init__(
        self, choose: ExpertChoice, experts: Mapping[int, GatedFeedForward], begins: list[int], ranks: Ranks
    ) -> None:
        self._choose, self._experts, self._ranks = choose, experts, ranks
        self._begins = torch.tensor(begins[1:-1], dtype=torch.int64)

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = [len(hidden) * rank // self._ranks.count for rank in range(self._ranks.count + 1)]
        sizes = [end - begin for begin, end in pairwise(rows)]
        mine = hidden[rows[self._ranks.rank] : rows[self._ranks.rank + 1]]
        return self._ranks.all_gather(self._routed(mine), sizes, dim=0)

    def _routed(self, hidden: Tensor) -> Tensor:
        shares, chosen = self._choose(hidden)
        # By expert, and so by rank; a token's experts are summed in this order.
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // self._choose.per_token
        count = self._ranks.count
        sent = torch.bincount(torch.bucketize(experts, self._begins.to(experts.device), right=True), minlength=count)
        received = self._ranks.all_to_all(sent, [1] * count, [1] * count)
        there, here = sent.tolist(), received.tolist()
        rows = self._ranks.all_to_all(hidden[tokens], there, here)
        numbers = self._ranks.all_to_all(experts, there, here)
        results = torch.empty_like(rows)
        for number, expert in self._experts.items():
            places = torch.where(numbers == number)[0]
            if len(places):
                results[places] = expert(rows[places])
        back = self._ranks.all_to_all(results, here, there)
        weights = shares.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add_(0, tokens, back * weights)

    def linears(self) -> dict[str, Linear]:
        """This rank's experts' linears, by role."""
        return {f"expert {e} {role}": m for e, expert in self._experts.items() for role, m in expert.linears().items()}
