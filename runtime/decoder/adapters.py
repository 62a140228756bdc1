"""LoRA adapters that are not merged: several on one base, each for its own rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.structure.lora import Adapter, LowRank
from ...system.errors import Problem, RuntimeProblem, raise_problems
from ...system.hardware.machine import human_bytes
from .linears.linear import Linear

_SHOWN = 6


@dataclass(frozen=True)
class Factors:
    """An adapter's change of one linear.

    Attributes:
        down: ``[rank, columns]``.
        up: ``[outputs, rank]``, multiplied by the scaling.
    """

    down: Tensor
    up: Tensor

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass
class StepRows:
    """Which adapter changes which rows of the step that runs.

    Attributes:
        of: rows by adapter; those of no adapter are missing.
    """

    of: dict[str, Tensor] = field(default_factory=dict)


class AdaptedLinear:
    """A linear and the adapters' changes of it.

    Args:
        base: without them.
        rows: of the step that runs.
        factors: by adapter, for those that change it.
    """

    waits = False

    def __init__(self, base: Linear, rows: StepRows, factors: dict[str, Factors]) -> None:
        self._base = base
        self._rows = rows
        self._factors = factors
        self.nbytes = base.nbytes
        self.numel = base.numel
        self.columns = base.columns

    def __call__(self, x: Tensor) -> Tensor:
        out = self._base(x)
        for name, rows in self._rows.of.items():
            factors = self._factors.get(name)
            if factors is not None:
                out.index_add_(0, rows, (x[rows] @ factors.down.T) @ factors.up.T)
        return out

    def explain(self) -> str:
        return self._base.explain()


@dataclass(frozen=True)
class AdapterTarget:
    """A linear of the model as adapters name it.

    Attributes:
        modules: names of the modules whose outputs it stacks.
        sizes: their numbers of outputs.
        columns: of their inputs.
        order: how its outputs are ordered; None if as stacked.
        factors: of the adapters that change it, by their names.
    """

    modules: Sequence[str]
    sizes: Sequence[int]
    columns: int
    order: Tensor | None
    factors: dict[str, Factors] = field(default_factory=dict)

    def shape(self, module: str) -> tuple[int, int]:
        """The shape of one module's weight."""
        return self.sizes[self.modules.index(module)], self.columns

    def size(self, adapter: Adapter) -> int:
        """How many numbers an adapter's factors have."""
        changes = [adapter.changes.get(f"{module}.weight") for module in self.modules]
        ranks = sum(change.rank for change in changes if isinstance(change, LowRank))
        return ranks * (self.columns + sum(self.sizes))

    def take(self, name: str, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        """Load an adapter's factors."""
        downs, ups = [], []
        begin = 0
        for module, size in zip(self.modules, self.sizes, strict=True):
            change = adapter.changes.get(f"{module}.weight")
            if isinstance(change, LowRank):
                down, up = change.factors()
                downs.append(down)
                whole = torch.zeros(sum(self.sizes), up.shape[1])
                whole[begin : begin + size] = up
                ups.append(whole)
            begin += size
        if downs:
            up = torch.cat(ups, dim=1)
            up = up if self.order is None else up[self.order]
            self.factors[name] = Factors(torch.cat(downs).to(device, dtype), up.to(device, dtype).contiguous())


def check_adapter(adapter: Adapter, targets: Sequence[AdapterTarget]) -> None:
    """Check that an adapter can be served beside its base.

    Raises:
        SmeltError: it cannot; one line for each weight.
    """
    known = {f"{module}.weight": target.shape(module) for target in targets for module in target.modules}
    problems = []
    for name, change in adapter.changes.items():
        if not isinstance(change, LowRank) or change.magnitude is not None or name not in known:
            what = "DoRA" if isinstance(change, LowRank) and change.magnitude is not None else "it"
            what = "a trained parameter" if not isinstance(change, LowRank) else what
            sentence = f"{what} cannot be served beside its base; merge the adapter with smelt merge"
        else:
            shape = tuple(reversed(change.shape)) if change.by_columns else change.shape
            sentence = change.problem() or (
                f"it is for a weight of {shape}, but the model's is {known[name]}" if shape != known[name] else ""
            )
        if sentence:
            problems.append(Problem(f"{adapter.directory}: {name}", sentence))
    if len(problems) > _SHOWN:
        rest = f"… and {len(problems) - _SHOWN} more weights do not fit; was the adapter trained on another model?"
        problems = [*problems[:_SHOWN], Problem(str(adapter.directory), rest)]
    raise_problems(problems)


class Adapters:
    """The adapters that a model has loaded.

    Args:
        targets: the linears that they may change.
        rows: of the step that runs.
        dtype, device: of their factors.
    """

    def __init__(
        self, targets: Sequence[AdapterTarget], rows: StepRows, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._targets = targets
        self.rows = rows
        self._dtype, self._device = dtype, device

    @property
    def nbytes(self) -> int:
        """Memory of those that are loaded."""
        return sum(factors.nbytes for target in self._targets for factors in target.factors.values())

    def load(self, name: str, adapter: Adapter, most: int) -> None:
        """Load an adapter under a name.

        Args:
            name: of its own.
            adapter: its files.
            most: bytes that all of them may take together.

        Raises:
            SmeltError: it cannot be served, or does not fit.
        """
        check_adapter(adapter, self._targets)
        needed = self._dtype.itemsize * sum(target.size(adapter) for target in self._targets)
        if self.nbytes + needed > most:
            raise RuntimeProblem(
                f"{adapter.directory} needs {human_bytes(needed)}, but {human_bytes(most - self.nbytes)} of memory are left for"
                " adapters; unload another one, or start with a higher adapter_bytes"
            )
        try:
            for target in self._targets:
                target.take(name, adapter, self._dtype, self._device)
        except BaseException:
            self.unload(name)
            raise

    def unload(self, name: str) -> None:
        """Drop an adapter's factors."""
        for target in self._targets:
            target.factors.pop(name, None)
