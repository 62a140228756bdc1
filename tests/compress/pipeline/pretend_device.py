"""A device that is the CPU under another name, and that refuses to compute with tensors of the CPU, as a GPU does.

A process that imports this has the device ``pretend`` from then on, so tests run it as a script: it does a step
there and prints every layer's error.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe
from smelt.compress.pipeline.plan import Plan
from smelt.models.steps import block_loop
from smelt.models.steps.parts import layers_of, load_part
from smelt.models.steps.step import RunContext
from smelt.prune.steps import hidden as prune_hidden
from smelt.system.processes.process_group import Processes
from smelt.system.progress import Progress
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
DEVICE = torch.device("pretend:0")
# These may read the one from the other on a GPU, too.
_CROSSING = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_")
_make_tensor = torch.tensor


class Pretending(torch.Tensor):
    """A tensor of the device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretending:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=DEVICE, **layout)
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @property
    def data(self) -> Tensor:
        return Pretending(self.held)

    @data.setter
    def data(self, value: Pretending) -> None:
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(call, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Within it, what is made on the device is made."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(call, args, kwargs or {})


def _computed(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = call._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, Pretending) for tensor in tensors)
    strangers = [t for t in tensors if not isinstance(t, Pretending) and t.dim() and t.device.type == "cpu"]
    if there and strangers and name not in _CROSSING:
        raise RuntimeError(f"{name}: one tensor is on the device, and one of {tuple(strangers[0].shape)} on the CPU")
    held = tree_map(lambda leaf: leaf.held if isinstance(leaf, Pretending) else leaf, (args, kwargs))
    wanted = kwargs.get("device")
    if wanted is not None:
        there = torch.device(wanted).type == DEVICE.type
        held[1]["device"] = "cpu" if there else wanted
    result = call(*held[0], **held[1])
    if not call._schema.returns:
        return None
    if name.endswith("_") and (not name.endswith("__") or "::__i" in name):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda leaf: Pretending(leaf) if there and isinstance(leaf, Tensor) else leaf, result)


def _tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """``torch.tensor``, which makes its tensor where no dispatch sees it."""
    wanted = torch.device(device) if device is not None else torch.empty(0).device
    return _make_tensor(*args, device="cpu", **kwargs).to(wanted)


def done(recipe: Recipe, journal: Path) -> dict[str, float]:
    """Do a recipe's step on the device; each layer's error, or a training's curve."""
    plan = Plan.make(recipe)
    assert not plan.problems, plan.problems
    (step,) = plan.prepared
    # A training alone reads no calibration text.
    tokens = torch.empty(0, 0, dtype=torch.int64) if plan.calibration is None else plan.calibration.tokens
    dtype = torch.float32
    with OnDevice():
        context = RunContext(dtype, tokens, recipe.seed, journal, Progress(False), Processes(DEVICE))
        step.run(context, journal.parent / "model")
    table = journal.parent.parent / f"training-step-{journal.name.removeprefix('step-')}.csv"
    if table.exists():
        rows = list(csv.DictReader(table.open()))
        return {f"{row['step']} {name}": float(row[name]) for row in rows for name in ("loss", "gradient_norm")}
    shares = journal / "shares.safetensors"
    if shares.exists():
        return {name: 1 - float(sums[0] / sums[1]) for name, sums in load_part(shares).items()}
    parts = sorted(path for path in journal.glob("*.safetensors") if path.stem != "taylor")
    return {layer["name"]: layer["error"] for layer in layers_of(parts)}


if __name__ == "__main__":
    torch.tensor = _tensor
    for module in (block_loop, prune_hidden):
        module.on = torch.device  # what `on` does for a GPU, without asking torch for one
    results = []
    for number, data in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        journal = Path(sys.argv[1]).with_name(f"pretended-{number}") / "journal" / "step-0"
        results.append(done(Recipe.model_validate(data), journal))
    print(json.dumps(results))
