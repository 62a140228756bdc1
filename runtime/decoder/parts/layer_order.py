"""The order of a layer's parts and norms, shared by torch's operators, torch.compile and the GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartName = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Branch:
    """A part that reads the hidden states and whose output is added to them.

    Attributes:
        part: its name.
        before: the norm of its input; None for none.
        after: the norm of its output; None for none.
    """

    part: PartName
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Stage:
    """Branches that read the same hidden states, and whose outputs are then added to them.

    Attributes:
        branches: attention before the feed-forward part, if it has both.
        closing: the norm of the hidden states after it; None for none.
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
