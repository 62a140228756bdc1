"""Hidden-state matching of student and teacher; a projection is learned if widths differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


class HiddenMatching(nn.Module):
    """The relative squared distance between the hidden states after blocks of both models.

    Args:
        student: its blocks.
        teacher: its blocks.
        pairs: which of the student's is compared with which of the teacher's.
        widths: of the student's hidden states and of the teacher's.

    Attributes:
        projections: from the student's width to the teacher's, one for each pair; none if they are equal. They are
            trained with the student, then discarded.
    """

    def __init__(
        self,
        student: Sequence[nn.Module],
        teacher: Sequence[nn.Module],
        pairs: Sequence[tuple[int, int]],
        widths: tuple[int, int],
    ) -> None:
        super().__init__()
        self._blocks = {"student": [student[i] for i, _ in pairs], "teacher": [teacher[j] for _, j in pairs]}
        self._seen: dict[str, list[Tensor]] = {}
        self.projections = nn.ModuleList()
        if widths[0] != widths[1]:
            for _ in pairs:
                projection = nn.Linear(widths[0], widths[1], bias=False)
                nn.init.orthogonal_(projection.weight, generator=torch.Generator().manual_seed(0))
                self.projections.append(projection)

    @contextmanager
    def watching(self, who: str) -> Iterator[None]:
        """Within it, record the outputs of the blocks of ``student`` or ``teacher``."""
        seen: dict[nn.Module, Tensor] = {}

        def note(block: nn.Module, _args: object, output: object) -> None:
            seen[block] = _states(output)

        with ExitStack() as hooks:
            for block in dict.fromkeys(self._blocks[who]):
                hooks.callback(block.register_forward_hook(note).remove)
            yield
        self._seen[who] = [seen[block] for block in self._blocks[who]]

    def forward(self, counted: Tensor | None) -> Tensor:
        """The mean over pairs and positions; ``counted [windows, length]`` weighs positions."""
        ours, theirs = self._seen.pop("student"), self._seen.pop("teacher")
        total = torch.zeros((), device=ours[0].device)
        for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
            wanted = wanted.detach().float()
            found = self.projections[number](mine.float()) if self.projections else mine.float()
            apart = (found - wanted).square().mean(-1) / wanted.square().mean(-1).clamp_min(1e-12)
            weight = torch.ones_like(apart) if counted is None else counted
            total = total + (apart * weight).sum() / weight.sum().clamp_min(1e-12)
        return total / len(ours)


def paired(student: int, teacher: int) -> list[tuple[int, int]]:
    """Pairs of blocks: each block of a shallower student spans several of the teacher's, and is paired with the last."""
    return [(i, max(0, (i + 1) * teacher // student - 1)) for i in range(student)]


def _states(output: object) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found
