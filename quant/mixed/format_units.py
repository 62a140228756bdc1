"""Units: linears that must be stored alike, and are therefore chosen together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...models.structure.open_model import OpenModel


@dataclass(frozen=True)
class Unit:
    """Linears that get one scheme.

    Attributes:
        name: its name in reports.
        linears: their full names, in the order they run.
        stacks: the same linears, grouped by those that servers fuse because they read the same input.
        is_experts: whether they are all experts of a model: transformers restores them only if all are quantized, alike.
    """

    name: str
    linears: tuple[str, ...]
    stacks: tuple[tuple[str, ...], ...]
    is_experts: bool = False


def find_units(model: OpenModel, wanted: Collection[str]) -> list[Unit]:
    """The units of some of a model's linears, in the order they run; experts first, the output head last.

    Args:
        model: whose.
        wanted: names of the linears to choose for.
    """
    units: list[Unit] = []
    experts: list[tuple[str, ...]] = []
    for block in model.anatomy.blocks:
        for phase in block.phases():
            stacks = [
                tuple(name for linear in group.linears if (name := f"{block.name}.{linear}") in wanted)
                for group in phase
            ]
            stacks = [stack for stack in stacks if stack]
            if stacks and model.linears[stacks[0][0]].is_expert:
                experts += stacks
            elif stacks:
                units.append(_unit(stacks))
    if experts:
        units.insert(0, _unit(experts, is_experts=True))
    head = model.anatomy.head
    return [*units, _unit([(head,)])] if head in wanted else units


def _unit(stacks: list[tuple[str, ...]], *, is_experts: bool = False) -> Unit:
    linears = tuple(name for stack in stacks for name in stack)
    if is_experts:
        return Unit("all experts", linears, tuple(stacks), True)
    parent = linears[0].rpartition(".")[0]
    others = [name.removeprefix(f"{parent}.") for name in linears[1:]]
    return Unit(" + ".join([linears[0], *others]), linears, tuple(stacks))
