"""``smelt merge``: merge an adapter into the compressed checkpoint it was trained on.

Weights that change are dequantized, changed, and quantized again to the format they had, one after another.
All others keep their codes, bit for bit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.checkpoint.weights import CheckpointWeights
from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_checkpoint
from ...models.structure.lora import Adapter, Change, adapted
from ...models.structure.open_model import OpenModel
from ...quant.grid import Grid
from ...quant.rounding.nearest import nearest
from ...quant.scale_search import fit_scales
from ...quant.scheme import Scheme
from ...quant.stored.compressed import open_dense
from ...quant.stored.config import StoredSchemes
from ...quant.stored.dense_weights import DenseWeights
from ...system.errors import SmeltError
from ...system.hardware.machine import human_bytes
from ...system.progress import Progress
from ...system.storage.files import write_text
from ...system.storage.new_directory import RECORD, appearing, check_output
from ...system.storage.paths import named_path
from ...system.versions import versions
from ..evaluation.measure import Evaluation
from ..evaluation.settings import Evaluate
from ..evaluation.subject import Subject
from ..pipeline.verify import random_windows, reload
from ..reporting.card import write_card

_ENOUGH = 0.5


@dataclass(frozen=True)
class Merged:
    """A checkpoint with an adapter merged into its weights.

    Attributes:
        path: the directory.
        rounded: number of quantized linears that were quantized again.
        kept: number that kept their codes.
        plain: number of unquantized weights that changed.
        survived: share of the adapter's change left after rounding, by projection on it; None if nothing was
            rounded.
        bytes: of its tensors.
        notes: notes for the user, one sentence each.
    """

    path: str
    rounded: int
    kept: int
    plain: int
    survived: float | None
    bytes: int
    notes: list[str]

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """As text for the terminal."""
        summary = f"{self.rounded} layers re-quantized, {self.kept} unchanged"
        summary += f", {self.plain} plain weights changed" if self.plain else ""
        summary += "" if self.survived is None else f", {self.survived:.0%} of the change survived"
        lines = [f"{self.path}: {summary}, {human_bytes(self.bytes)}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def merge(
    checkpoint: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    fresh: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Merged:
    """Merge a LoRA adapter into a compressed checkpoint; every layer keeps its number format.

    Weights are rounded to nearest on newly searched scales; no text is needed. A recipe with ``adapter:`` rounds with
    calibration instead, which loses less.

    Args:
        checkpoint: a directory, a run's output directory or a hub name.
        adapter: the directory saved by `peft`.
        output: the new directory.
        fresh: overwrite an earlier merge.
        trust_remote_code: run Python code that comes with the checkpoint.
        progress: show progress bars when standard error is a terminal.

    Raises:
        SmeltError: the adapter does not belong to the checkpoint or cannot be merged; nothing was changed.
    """
    checkpoint, adapter, output = str(checkpoint), named_path(adapter), named_path(output)
    show = Progress(progress)
    directory = find_checkpoint(checkpoint, trust_remote_code=trust_remote_code)
    check_output(output, directory.path, "merge", fresh=fresh)
    config = directory.config_data()
    if not config.get("quantization_config"):
        raise SmeltError(
            f"{directory.path}: its weights are not quantized; use a recipe, which merges and quantizes (adapter: {adapter})"
        )
    found = Adapter(adapter)
    opened = open_dense(directory)
    model = adapted(opened, found)
    merging = _Merging(opened, model, found.bound(opened), StoredSchemes(config["quantization_config"]))
    entries = merging.entries()
    size = sum(info.nbytes for _, info, _ in entries)
    with appearing(output, size) as staging:
        show.say(f"writing {human_bytes(size)}")
        write_checkpoint(staging, directory.path, config, entries, with_code=trust_remote_code)
        result = Merged(str(output), *merging.counts(), merging.survived(), size, merging.notes())
        show.say("reloading the checkpoint")
        with tempfile.TemporaryDirectory(prefix="smelt-") as spill:
            outcome = reload(model, staging, random_windows(model), Path(spill))
            facts = {key: value for key, value in result.as_data().items() if key != "path"}
            facts = {
                **_known(directory),
                "versions": versions(),
                "merge": {**facts, "of": directory.name, "rounding": "nearest", "adapter": found.facts()},
                "reload": outcome.as_data(),
            }
            write_text(staging / RECORD, json.dumps(facts, indent=2) + "\n")
            _write_card(directory, staging, output.name, found, Path(spill))
    return result


class _Merging:
    """What happens to each tensor of a checkpoint."""

    def __init__(self, base: OpenModel, model: OpenModel, changes: dict[str, Change], schemes: StoredSchemes) -> None:
        assert isinstance(base.weights, DenseWeights)
        self._packed = base.weights.packed
        self._stored: CheckpointWeights = base.stored
        self._base = base.weights
        self._model = model
        self._changes = changes
        # Of the changes: their projection after rounding, and their squared norm.
        self._along = self._whole = 0.0
        self._schemes = schemes
        self._together = _with_one_global_scale(model, self._packed, self._scheme)
        self._again = {key for key in self._packed if any(other in changes for other in self._group(key))}
        self._rounded: Callable[[tuple[str, ...]], dict[str, Tensor]] = lru_cache(maxsize=1)(self._round)

    def entries(self) -> list[Entry]:
        """Every tensor of the merged checkpoint; those made together are adjacent."""
        of_part = {part: key for key, parts in self._packed.items() for part in parts}
        found: dict[str, Entry] = {}
        for name in self._stored.names():
            key = of_part.get(name)
            if key in self._again:
                for each in self._group(key):
                    for part in self._packed[each]:
                        found.setdefault(part, (part, self._stored.info(part), self._loader(each, part)))
            else:
                info = self._stored.info(name)
                load = self._model.weights.load if name in self._changes else self._stored.load
                found[name] = (name, info, lambda name=name, load=load, info=info: load(name).to(info.dtype))
        return list(found.values())

    def counts(self) -> tuple[int, int, int]:
        """Linears quantized again, linears kept, and unquantized weights changed."""
        plain = sum(key not in self._packed for key in self._changes)
        return len(self._again), len(self._packed) - len(self._again), plain

    def survived(self) -> float | None:
        """The share of the change that the written codes contain."""
        return self._along / self._whole if self._whole else None

    def notes(self) -> list[str]:
        """What was lost, and what was not recomputed."""
        survived = self.survived()
        lost = []
        if survived is not None and survived < _ENOUGH:
            lost = [
                f"only {survived:.0%} of the adapter's change survived rounding to the nearest codes;"
                " a recipe with adapter: and rounding: gptq keeps more"
            ]
        names = {name.rpartition(".")[2] for name in self._stored.names()}
        kept = [
            sentence
            for sentence, marks in (
                ("inputs", {"input_scale", "input_global_scale"}),
                ("cached keys and values", {"k_scale", "v_scale"}),
            )
            if marks & names
        ]
        if not kept:
            return lost
        return [
            *lost,
            f"the static scales of {' and '.join(kept)} are still those from before the merge;"
            " a recipe with adapter: calibrates new ones",
        ]

    def _scheme(self, key: str) -> Scheme:
        return self._schemes.of(key.removesuffix(".weight"))

    def _group(self, key: str | None) -> tuple[str, ...]:
        return self._together.get(key, (key,)) if key is not None else ()

    def _loader(self, key: str, part: str) -> Callable[[], Tensor]:
        return lambda: self._rounded(self._group(key))[part]

    def _round(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The stored tensors of linears that are rounded together."""
        weights = {key: self._model.weights.load(key).float() for key in keys}
        first = next(iter(weights))
        scheme, stored = self._scheme(first), self._model.weights.info(first).dtype
        whole = torch.cat(list(weights.values()))
        grid = Grid.fit(whole, scheme.args, stored)
        grid = fit_scales(whole, grid, torch.ones(whole.shape[1]))
        rounded = nearest(whole, scheme.args, grid=grid)
        found: dict[str, Tensor] = {}
        start = 0
        for key, weight in weights.items():
            mine = rounded.rows(start, start + len(weight)) if len(weights) > 1 else rounded
            start += len(weight)
            if key in self._changes:
                before = self._base.load(key).float()
                change = (weight - before).double()
                self._along += ((mine.values - before).double() * change).sum().item()
                self._whole += change.square().sum().item()
            prefix = key.removesuffix("weight")
            tensors = {prefix + local: tensor for local, tensor in mine.stored(scheme).items()}
            for part in self._packed[key]:
                wanted = self._stored.info(part)
                if part not in tensors or (tensors[part].dtype, tuple(tensors[part].shape)) != (
                    wanted.dtype,
                    wanted.shape,
                ):
                    raise SmeltError(
                        f"{self._stored.directory}: {part} is in a format that Smelt reads but does not write;"
                        " use a recipe with adapter:, which quantizes again"
                    )
            found |= tensors
        return found


def _with_one_global_scale(
    model: OpenModel, packed: Iterable[str], scheme_of: Callable[[str], Scheme]
) -> dict[str, tuple[str, ...]]:
    """For each weight that shares NVFP4's global scale with others, which servers fuse: all of them."""
    found: dict[str, tuple[str, ...]] = {}
    known = set(packed)
    for block in model.anatomy.blocks:
        for group in block.groups:
            keys = [model.linears[f"{block.name}.{name}"].key for name in group.linears]
            keys = [key for key in keys if key in known and scheme_of(key).args.strategy == "tensor_group"]
            found |= {key: tuple(keys) for key in keys}
    return found


def _known(directory: ModelDirectory) -> dict[str, Any]:
    """What remains true of the checkpoint's record: the model it was made from, and the recipe."""
    made = directory.record()
    return {key: made[key] for key in ("recipe", "seed", "data", "model", "export") if key in made}


def _write_card(base: ModelDirectory, merged: Path, name: str, adapter: Adapter, spill: Path) -> None:
    called = base.path.parent.name if base.path.name == "checkpoint" else base.path.name
    subjects = [
        Subject(called, base, "baseline"),
        Subject(
            f"{name}, with the adapter {adapter.directory.name}",
            ModelDirectory(name, merged, base.trust_remote_code),
            "candidate",
        ),
    ]
    title = f"{called} with an adapter merged by Smelt"
    nothing = Evaluation(
        subjects, Evaluate(samples=0, speed=False), None, spill, Progress(False), title=title, wanted=False
    )
    write_card(nothing.report(), merged, replace(base, name=called))
