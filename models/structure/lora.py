"""LoRA adapters as `peft` saves them: which of a model's weights they change, and how.

The files are read here and not by peft, so that merging needs neither peft nor the whole model in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ...system.errors import Problem, SmeltError, nearest_name, raise_problems
from ...system.storage.digests import digest
from ...system.storage.paths import named_path
from ...system.storage.tensor_files import SafetensorsFile
from ..checkpoint.weights import ChangedWeights, Weights
from .open_model import OpenModel

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# The suffix of a tensor's name after its module's: a low-rank factor, or a fully trained parameter.
_PART = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector|lora_embedding_A|lora_embedding_B)")
# Settings that merging uses, and those that only describe how an adapter was trained.
_FOLLOWED = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"}
_OF_TRAINING = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "fan_in_fan_out",
    "bias",
    "modules_to_save",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "ensure_weight_tying",
    "runtime_config",
    # Their tensors name the parameters; those of fused experts are refused later, as the model has no such parameters.
    "target_parameters",
}
# Other initializations subtract the adapter's initial value from the base weights, which then differ from the checkpoint.
_KEEPS_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
_SHOWN = 6


@dataclass(frozen=True)
class LowRank:
    """The change of one matrix: ``scaling * up @ down`` is added; DoRA then sets the norm of each row.

    Attributes:
        file: where its tensors are.
        down, up: the names of the two factors.
        scaling: what their product is multiplied by.
        magnitude: the name of DoRA's row norms; None for plain LoRA.
        by_columns: whether the weight is stored with its outputs as columns: embeddings, and GPT-2's Conv1D.
    """

    file: SafetensorsFile
    down: str
    up: str
    scaling: float
    magnitude: str | None
    by_columns: bool = False

    @property
    def rank(self) -> int:
        return self.file.tensors[self.down].shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it changes."""
        shape = (*self.file.tensors[self.up].shape[:1], *self.file.tensors[self.down].shape[1:])
        return shape[::-1] if self.by_columns else shape

    def problem(self) -> str | None:
        """Why its factors do not match, or None."""
        down, up = self.file.tensors[self.down].shape, self.file.tensors[self.up].shape
        if len(down) != 2 or len(up) != 2 or up[1] != down[0]:
            return f"its factors are {down} and {up}, which do not form a low-rank update of a matrix"
        return None

    def factors(self) -> tuple[Tensor, Tensor]:
        """``down [rank, inputs]`` and ``up [outputs, rank]`` of a linear, in float32; the scaling is in ``up``."""
        return _finite(self.file, self.down), _finite(self.file, self.up).mul_(self.scaling)

    def __call__(self, weight: Tensor) -> Tensor:
        """A float32 weight, changed."""
        delta = (_finite(self.file, self.up) @ _finite(self.file, self.down)).mul_(self.scaling)
        if self.by_columns:
            delta = delta.T
        changed = weight + delta
        if self.magnitude is None:
            return changed
        lengths = changed.T.norm(dim=1) if self.by_columns else changed.norm(dim=1)
        factors = (_finite(self.file, self.magnitude).view(-1) / lengths).unsqueeze(1)
        return changed * (factors.T if self.by_columns else factors)


@dataclass(frozen=True)
class Replacement:
    """A fully trained parameter: an embedding or lm_head of ``modules_to_save``, or a bias."""

    file: SafetensorsFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    def __call__(self, weight: Tensor) -> Tensor:
        """The parameter, in float32."""
        return _finite(self.file, self.name)


Change = LowRank | Replacement


class Adapter:
    """A directory that `peft`'s ``save_pretrained`` wrote for a LoRA adapter.

    Attributes:
        changes: what it changes, by the parameter's name in the model.

    Args:
        directory: where ``adapter_config.json`` and ``adapter_model.safetensors`` are.

    Raises:
        SmeltError: it is not an adapter directory, or of a kind that cannot be merged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = named_path(directory)
        self._settings = self._read_settings()
        if not (self.directory / _TENSORS).exists():
            raise SmeltError(
                f"{self.directory}: has no {_TENSORS}; save the adapter with safe_serialization=True, which is peft's default"
            )
        self._file = SafetensorsFile(self.directory / _TENSORS)
        self._raise_refusals()
        self.changes = self._find_changes()

    def fingerprint(self) -> str:
        """A digest of everything that determines its effect."""
        kept = {key: value for key, value in self._settings.items() if key not in _OF_TRAINING}
        with self._file.path.open("rb") as stream:
            return digest([kept, hashlib.file_digest(stream, "sha256").hexdigest()])

    def facts(self) -> dict[str, Any]:
        """What a merged checkpoint records of the adapter."""
        ranks = sorted({change.rank for change in self.changes.values() if isinstance(change, LowRank)})
        replaced = sorted(name for name, change in self.changes.items() if isinstance(change, Replacement))
        return {
            "name": self.directory.name,
            "sha256": self.fingerprint(),
            "kind": "DoRA" if self._settings.get("use_dora") else "LoRA",
            "ranks": ranks,
            "changed": len(self.changes) - len(replaced),
            "replaced": replaced,
        }

    def bound(self, model: OpenModel) -> dict[str, Change]:
        """Its changes by the checkpoint's tensor names.

        Raises:
            SmeltError: it was trained on another model; one line for each mismatch.
        """
        skeleton = model.skeleton
        shared = {f"{skeleton.embedding_name}.weight", f"{skeleton.head_name}.weight"} if model.is_tied else set()
        found: dict[str, Change] = {}
        problems = []
        for name, change in self.changes.items():
            key = model.names.get(name)
            if name in shared:
                sentence = (
                    "the model's lm_head and input embedding are tied, and merging would change both;"
                    " train the adapter without it"
                )
            elif key is None and ".experts." in name:
                sentence = (
                    "it changes fused experts, and the checkpoint stores each expert separately; train without them"
                )
            elif key is None:
                sentence = f"the model has no such weight{nearest_name(name, list(model.names))}"
            else:
                module = skeleton.model.get_submodule(name.rpartition(".")[0])
                if isinstance(change, LowRank) and isinstance(module, Conv1D):
                    change = LowRank(**{**vars(change), "by_columns": True})
                shape = tuple(model.weights.info(key).shape)
                sentence = (isinstance(change, LowRank) and change.problem()) or (
                    f"it is for a weight of {change.shape}, but the model's is {shape}" if change.shape != shape else ""
                )
                found[key] = change
            if sentence:
                problems.append(Problem(f"{self.directory}: {name}", sentence))
        if len(problems) > _SHOWN:
            rest = f"… and {len(problems) - _SHOWN} more weights do not fit; was the adapter trained on another model?"
            problems = [*problems[:_SHOWN], Problem(str(self.directory), rest)]
        raise_problems(problems)
        return found

    def _read_settings(self) -> dict[str, Any]:
        path = self.directory / _CONFIG
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise SmeltError(
                f"{self.directory}: has no {_CONFIG}, so it is not a peft adapter; check the path"
            ) from None
        except (OSError, ValueError) as error:
            raise SmeltError(f"{path}: cannot be read ({error}); save the adapter again") from None
        if not isinstance(data, dict):
            raise SmeltError(f"{path}: does not hold an adapter's settings; save the adapter again")
        return data

    def _raise_refusals(self) -> None:
        settings = self._settings
        kind = settings.get("peft_type")
        if kind != "LORA":
            raise SmeltError(f"{self.directory}: is a {kind} adapter; Smelt merges LoRA (and DoRA) adapters only")
        start = settings.get("init_lora_weights", True)
        if start not in _KEEPS_THE_BASE:
            raise SmeltError(
                f"{self.directory}: was initialized with init_lora_weights={start!r}, which also changes the base weights;"
                " convert it to plain LoRA first (peft: save_pretrained(path_initial_model_for_weight_conversion=…))"
            )
        known = _FOLLOWED | _OF_TRAINING
        strange = [key for key, value in settings.items() if key not in known and value]
        if strange:
            raise SmeltError(f"{self.directory}: uses {', '.join(strange)}, which Smelt cannot merge")

    def _find_changes(self) -> dict[str, Change]:
        parts: dict[str, dict[str, str]] = {}
        changes: dict[str, Change] = {}
        strange = []
        for stored in self._file.tensors:
            name = stored.removeprefix(_PREFIX)
            part = _PART.fullmatch(name.removesuffix(".weight") if "magnitude" in name else name)
            if part is not None:
                parts.setdefault(part[1], {})[part[2].removesuffix(".weight")] = stored
            elif "lora_" in name or not name.endswith((".weight", ".bias")):
                strange.append(stored)
            else:
                changes[name.replace(".base_layer", "")] = Replacement(self._file, stored)
        for module, each in parts.items():
            embedding = "lora_embedding_A" in each
            down, up = (f"lora_embedding_{x}" if embedding else f"lora_{x}" for x in "AB")
            if each.keys() - {"lora_magnitude_vector"} != {down, up}:
                raise SmeltError(f"{self._file.path}: {module} lacks one of {down} and {up}; save the adapter again")
            magnitude = each.get("lora_magnitude_vector")
            if (magnitude is not None) != bool(self._settings.get("use_dora")):
                raise SmeltError(
                    f"{self._file.path}: {module} does not fit use_dora in {_CONFIG}; save the adapter again"
                )
            rank = max(1, self._file.tensors[each[down]].shape[0])
            scaling = self._scaling(module, rank)
            changes[f"{module}.weight"] = LowRank(self._file, each[down], each[up], scaling, magnitude, embedding)
        if strange:
            raise SmeltError(f"{self._file.path}: holds {strange[0]}, which Smelt cannot merge")
        if not changes:
            raise SmeltError(f"{self._file.path}: holds no weights; save the adapter again, after training")
        return changes

    def _scaling(self, module: str, rank: int) -> float:
        alpha = self._settings.get("lora_alpha", 8)
        for pattern, other in (self._settings.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = other
                break
        return float(alpha) / (rank**0.5 if self._settings.get("use_rslora") else rank)


def adapted(model: OpenModel, adapter: Adapter) -> OpenModel:
    """The model that an adapter was trained on, with the adapter's changes in its weights.

    Raises:
        SmeltError: the adapter was trained on another model.
    """
    return OpenModel(model.directory, AdaptedWeights(model.weights, adapter.bound(model)), is_edited=True)


class AdaptedWeights(ChangedWeights):
    """Weights with an adapter's changes in them; each is changed as it is read.

    Changed weights are returned in float32, so that small changes are not lost before rounding.

    Args:
        source: the weights that the adapter was trained on.
        changes: what is changed, by name.
    """

    def __init__(self, source: Weights, changes: Mapping[str, Change]) -> None:
        super().__init__(source)
        self.changes = changes

    def load(self, name: str) -> Tensor:
        """A tensor, changed."""
        tensor = self._source.load(name)
        return self.changes[name](tensor.float()) if name in self.changes else tensor


def _finite(file: SafetensorsFile, name: str) -> Tensor:
    tensor = file.load(name).float()
    if not torch.isfinite(tensor).all():
        raise SmeltError(f"{file.path}: {name} holds NaN or infinite values; its training failed, train it again")
    return tensor
