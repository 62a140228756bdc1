"""How a layer's parts are put together: once, for torch's operators, torch.compile and the GPU's kernels alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartName = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Branch:
    """A part that reads the hidden states and gives what is added to them.

    Attributes:
        part: which.
        before: the norm of what it reads; None for none.
        after: the norm of what it gives; None for none.
    """

    part: PartName
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Stage:
    """Branches that all read the same hidden states, and then add to them.

    Attributes:
        branches: attention before the feed-forward part, where both are here.
        closing: the norm of the hidden states themselves behind it; None for none.
    """

    branches: tuple[Branch, ...]
    closing: str | None = None


def stages_of(order: str, attends: bool, feeds: bool) -> tuple[Stage, ...]:
    """A layer's stages, one after another.

    Args:
        order: as :class:`.architectures.DecoderSpec` has it: ``sequential``, ``parallel`` or ``after``.
        attends, feeds: whether the layer has attention, and a feed-forward part.
    """
    if order == "after":
        attention, forward = Branch("attention", None, None), Branch("mlp", None, None)
        return (
            Stage((attention,) if attends else (), "before_attention"),
            Stage((forward,) if feeds else (), "before_mlp"),
        )
    if order == "parallel" and attends and feeds:
        return (Stage((Branch("attention", "before_attention", None), Branch("mlp", "before_mlp", None))),)
    found = []
    if attends:
        found.append(Stage((Branch("attention", "before_attention", "after_attention"),)))
    if feeds:
        found.append(Stage((Branch("mlp", "before_mlp", "after_mlp"),)))
    return tuple(found)
