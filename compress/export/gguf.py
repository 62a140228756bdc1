"""A checkpoint as one GGUF file, for llama.cpp and programs built on it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType
from torch import Tensor

from ...models.directory.layer_sizes import LAYER_SIZES
from ...runtime.decoder.architectures import DecoderSpec, spec_of
from ...runtime.weights.checkpoint import Checkpoint
from ...system.errors import Problem, SmeltError, raise_problems
from ...system.hardware.machine import human_bytes
from ...system.progress import Progress
from ...system.storage.files import read_json
from ...system.storage.new_directory import RECORD, check_room
from .gguf_architectures import ARCHITECTURES, Architecture, differences, shortcomings
from .gguf_fields import fields_of
from .gguf_file import WRITTEN_BY, GgufFile, Written
from .gguf_positions import Positions, positions_of
from .gguf_storage import AUTO, EXACT, KINDS, REQUANTIZED, RESCALED, GGUFType, StoredTensor, bytes_of, together
from .gguf_tensors import Large, Small, tensors_of
from .gguf_tokenizer import Tokenizer, tokenizer_of

_QUANTIZATION_VERSION = 2
_OTHER_FILE_TYPES = {"MXFP4": 38, "NVFP4": 39}


@dataclass
class Carried:
    """The tensors that a file stores in one type.

    Attributes:
        exact: number that are unchanged: the same codes and scales, or the same values.
        rescaled: number with the same codes, with scales rounded to float16.
        requantized: number that were quantized again.
        worst_error: the largest relative RMS error of the latter two.
    """

    exact: int = 0
    rescaled: int = 0
    requantized: int = 0
    worst_error: float = 0.0


@dataclass
class GgufRecord:
    """What was written.

    Attributes:
        path: the file.
        bytes: its size.
        tensors: by GGUF type.
        notes: notes for the user, one sentence each.
    """

    path: str
    bytes: int = 0
    tensors: dict[str, Carried] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """As text for the terminal."""
        lines = [f"{self.path}: {human_bytes(self.bytes)}"]
        for name, carried in sorted(self.tensors.items()):
            lines.append(f"{name}: {', '.join(_counts(carried))}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def gguf_problems(checkpoint: Path, target: Path, kind: str | None) -> list[Problem]:
    """Everything that would make :func:`export_gguf` fail, without reading a weight.

    Args:
        checkpoint: a directory that the runtime reads.
        target: the file to write.
        kind: a name of :data:`~.gguf_storage.KINDS`, or None for types that hold each weight exactly.
    """
    found = _target_problems(target)
    if kind is not None and kind.upper() not in KINDS:
        found.append(Problem("--type", f"unknown type {kind!r}; known: {', '.join(KINDS)}"))
    try:
        found += _Opened(checkpoint).problems()
    except SmeltError as error:
        found.append(Problem(str(checkpoint), str(error).removeprefix(f"{checkpoint}: ")))
    return found


def gguf_limits(model: Path, config: Any | None = None) -> list[str]:
    """Why a checkpoint cannot be exported, one sentence each, whatever the output path.

    Args:
        model: its directory, or that of the model it would be made from.
        config: its configuration, if not the directory's.
    """
    try:
        opened = _Opened(model)
        config = opened.checkpoint.config if config is None else config
        if getattr(config, LAYER_SIZES, None) is not None:
            return ["its blocks differ in size"]
        return opened.limits(config)
    except SmeltError as error:
        return [str(error).removeprefix(f"{model}: ")]


def export_gguf(checkpoint: Path, target: Path, *, kind: str | None = None, progress: Progress) -> GgufRecord:
    """Write a checkpoint as a GGUF file; one tensor (of a mixture, all experts' of a layer) at a time is in memory, as it is and as it is written.

    Args:
        checkpoint: a directory that the runtime reads.
        target: the file; it appears when it is complete.
        kind: the type of linears; None keeps each one's codes, in the smallest type that holds them.
        progress: shows progress.

    Raises:
        SmeltError: it cannot be exported or written.
    """
    raise_problems(gguf_problems(checkpoint, target, kind))
    opened, stored_as = _Opened(checkpoint), AUTO if kind is None else KINDS[kind.upper()]
    check_room(target, opened.nbytes(stored_as))
    return _write(opened, target, stored_as, progress)


class _Opened:
    """A checkpoint with all that is known before its weights are read."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = Checkpoint(path)
        config, directory = self.checkpoint.config, self.checkpoint.directory
        known = ARCHITECTURES.get(config.model_type)
        if known is None:
            names = ", ".join(sorted(ARCHITECTURES))
            raise SmeltError(f"the architecture {config.model_type!r} cannot be exported to GGUF; {names} can")
        self.architecture: Architecture = known
        self.spec: DecoderSpec = spec_of(config)
        self.checkpoint.check()
        self.positions: Positions = positions_of(config, self.spec, known)
        self.tensors = tensors_of(self.checkpoint, self.spec, known)
        self.tokenizer: Tokenizer = tokenizer_of(
            directory.tokenizer(),
            self.spec.vocabulary,
            directory.end_tokens(config),
            getattr(config, "bos_token_id", None),
        )

    def nbytes(self, kind: GGUFType) -> int:
        """About how large the file will be; most types that hold codes exactly have scales of the same size."""
        if kind.linear is None or kind.table is None:
            return self.checkpoint.weights.nbytes
        large = [tensor for tensor in self.tensors if isinstance(tensor, Large)]
        return sum(bytes_of(kind.table if each.table else kind.linear, each.elements) for each in large)

    def problems(self) -> list[Problem]:
        """What llama.cpp does not support of the architecture."""
        return [Problem(str(self.checkpoint.path), what) for what in self.limits(self.checkpoint.config)]

    def limits(self, config: Any) -> list[str]:
        """The same as sentences, for a model made from this one with another configuration."""
        spec = spec_of(config)
        positions = positions_of(config, spec, self.architecture)
        return [*shortcomings(self.architecture, spec, config.model_type), *positions.problems]


def _write(opened: _Opened, target: Path, kind: GGUFType, progress: Progress) -> GgufRecord:
    record = GgufRecord(str(target))
    arch = MODEL_ARCH_NAMES[opened.architecture.arch]
    fields = fields_of(opened.checkpoint.config, opened.spec, opened.architecture) | opened.positions.fields
    fields = {
        **WRITTEN_BY,
        "general.name": _model_name(opened),
        "general.type": "model",
        **_sampling(opened),
        "general.quantization_version": _QUANTIZATION_VERSION,
        "general.file_type": kind.file_type,
        **{f"{arch}.{name}": value for name, value in fields.items()},
        **opened.tokenizer.fields,
    }
    file = GgufFile(target, arch, fields, _dimensions(opened, kind))
    linears: Counter[str] = Counter()
    larger = 0

    def each() -> Iterator[Written]:
        nonlocal larger
        for name, tensor in opened.positions.tensors.items():
            yield _small(name, tensor, record)
        for tensor in progress.track(opened.tensors, "writing"):
            if isinstance(tensor, Small):
                yield _small(tensor.name, tensor.load(), record)
                continue
            matrices = tensor.load()
            wanted = kind.table if tensor.table else kind.linear
            found = together(matrices, wanted)
            used = found[0].type
            _count(record, found)
            if not tensor.table:
                linears[used.name] += sum(part.data.nbytes for part in found)
            larger += wanted is not None and used.name != wanted
            rows, columns = matrices[0].shape
            shape = (len(matrices), rows, columns) if tensor.stacked else (rows, columns)
            del matrices
            yield tensor.name, [part.data for part in found], shape, used
            if tensor.factored and kind is AUTO:
                if used is not GGMLQuantizationType.NVFP4:
                    raise SmeltError(
                        f"{opened.checkpoint.path}: {tensor.name}: its NVFP4 scales are not all numbers; quantize it again"
                    )
                yield _small(_factor_name(tensor), _factors(found), record)
            del found
        if kind is AUTO and linears:
            fields["general.file_type"] = _file_type(linears.most_common(1)[0][0])

    file.write(each())
    record.bytes = file.nbytes
    record.notes = [*_notes(record, kind, larger), *differences(opened.architecture, opened.spec)]
    record.notes += [*opened.positions.notes, *opened.tokenizer.notes]
    return record


def _model_name(opened: _Opened) -> str:
    """What the model is called. llama.cpp recognizes Phi-3 by it, then looks for that model's tokens, or fails."""
    path = opened.checkpoint.path.resolve()
    name = path.name
    if name == "checkpoint" and (path / RECORD).is_file():  # of a run, whose record names the model
        known = read_json(path / RECORD, "the record").get("model")
        name = (known.get("name") if isinstance(known, dict) else None) or path.parent.name
        name = Path(name).name
    if {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= set(opened.tokenizer.fields["tokenizer.ggml.tokens"]):
        return name
    return re.sub("phi-?3", "phi 3", name, flags=re.IGNORECASE)


def _sampling(opened: _Opened) -> dict[str, Any]:
    """How the model's authors want tokens chosen, which llama.cpp follows where it is not asked otherwise."""
    known = opened.checkpoint.directory.sampling_defaults()
    fields = {
        "temperature": ("temp", float),
        "top_k": ("top_k", int),
        "top_p": ("top_p", float),
        "min_p": ("min_p", float),
    }
    return {f"general.sampling.{name}": of(known[key]) for key, (name, of) in fields.items() if known.get(key, 0) > 0}


def _dimensions(opened: _Opened, kind: GGUFType) -> dict[str, int]:
    found = dict.fromkeys(opened.positions.tensors, 1)
    for tensor in opened.tensors:
        if isinstance(tensor, Small):
            found[tensor.name] = tensor.dimensions
            continue
        found[tensor.name] = 3 if tensor.stacked else 2
        if tensor.factored and kind is AUTO:
            found[_factor_name(tensor)] = 1
    return found


def _small(name: str, tensor: Tensor, record: GgufRecord) -> Written:
    values = tensor.to(torch.float32).contiguous()
    record.tensors.setdefault("F32", Carried()).exact += 1
    return name, [values.numpy()], tuple(values.shape), GGMLQuantizationType.F32


def _factor_name(tensor: Large) -> str:
    return tensor.name.removesuffix("weight") + "scale"


def _factors(found: list[StoredTensor]) -> Tensor:
    """One for each expert, or one: the rows of a matrix share theirs."""
    return torch.stack([torch.ones(()) if each.factor is None else each.factor[0] for each in found])


def _count(record: GgufRecord, found: list[StoredTensor]) -> None:
    how = max((each.how for each in found), key=(EXACT, RESCALED, REQUANTIZED).index)
    carried = record.tensors.setdefault(found[0].type.name, Carried())
    carried.exact += how == EXACT
    carried.rescaled += how == RESCALED
    carried.requantized += how == REQUANTIZED
    carried.worst_error = max(carried.worst_error, *(each.error for each in found))


def _file_type(name: str) -> int:
    return _OTHER_FILE_TYPES[name] if name in _OTHER_FILE_TYPES else KINDS[name].file_type


def _target_problems(target: Path) -> list[Problem]:
    parent = target.parent
    if target.suffix != ".gguf":
        return [Problem("--output", f"{target} must end in .gguf")]
    if target.is_dir():
        return [Problem("--output", f"{target} is a directory; choose another name")]
    if not parent.is_dir():
        return [Problem("--output", f"{parent} is not a directory; create it first")]
    if not os.access(parent, os.W_OK):
        return [Problem("--output", f"{parent} is not writable; choose another")]
    return []


def _counts(carried: Carried) -> list[str]:
    said = []
    if carried.exact:
        said.append(f"{carried.exact} exactly")
    if carried.rescaled:
        said.append(f"{carried.rescaled} with the same codes and rounded scales")
    if carried.requantized:
        said.append(f"{carried.requantized} re-quantized")
    if carried.worst_error:
        said.append(f"relative error up to {carried.worst_error:.2g}")
    return said


def _notes(record: GgufRecord, kind: GGUFType, larger: int) -> list[str]:
    notes = []
    for name, carried in sorted(record.tensors.items()):
        if kind is AUTO and carried.requantized:
            notes.append(
                f"{carried.requantized} weights are in a format that no GGUF type supports; they were re-quantized to {name}, "
                f"with a relative error up to {carried.worst_error:.2g}"
            )
        if carried.rescaled:
            notes.append(
                f"{carried.rescaled} weights keep their codes in {name}, but their scales or minima were rounded to float16"
            )
    if larger:
        notes.append(
            f"{larger} weights have another type than the one asked for, since their rows are not whole blocks of it "
            "or their scales are out of float16's range"
        )
    return notes
