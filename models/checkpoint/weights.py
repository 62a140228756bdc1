"""The weights of a model directory, found by name, read one at a time and checked as they are read."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch
from torch import Tensor

from ...system.errors import SmeltError
from ...system.storage.digests import file_digest
from ...system.storage.files import read_json
from ...system.storage.tensor_files import SafetensorsFile, TensorInfo

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ROWS = 8192  # of two tensors that are compared


class Weights(Protocol):
    """Tensors by their names in a checkpoint."""

    def names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def load(self, name: str) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


class ChangedWeights:
    """Tensors of another source, each changed as it is read; subclasses replace what is different.

    Args:
        source: the others.
    """

    def __init__(self, source: Weights) -> None:
        self._source = source

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def load(self, name: str) -> Tensor:
        return self._source.load(name)

    @property
    def nbytes(self) -> int:
        return sum(self.info(name).nbytes for name in self.names())


class CheckpointWeights:
    """The safetensors files of a directory, their headers read and checked; missing shards are errors here, not later.

    Raises:
        SmeltError: a file is missing or damaged, or the index contradicts the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._prefix = ""
        self._files: dict[str, SafetensorsFile] = {}
        for path, expected in self._shards().items():
            file = SafetensorsFile(path)
            for name in file.tensors:
                if name in self._files:
                    raise SmeltError(
                        f"{directory}: {name} is in two shards, {self._files[name].path.name} and {path.name}; they do"
                        " not belong together, download the model again"
                    )
                self._files[name] = file
            lost = [name for name in expected if name not in file.tensors]
            if lost:
                raise SmeltError(
                    f"{path}: the index lists {lost[0]} here, but the file does not contain it; download it again"
                )

    def names(self) -> list[str]:
        return list(self._files)

    def without(self, name: str) -> CheckpointWeights:
        """The same but one tensor."""
        found = copy.copy(self)
        found._files = {each: file for each, file in self._files.items() if each != name}
        return found

    def under(self, prefix: str, beside: Sequence[str]) -> CheckpointWeights:
        """The same with a prefix before all names, but for those of modules ``beside`` what it is of."""
        found = copy.copy(self)
        found._prefix = prefix
        found._files = {
            name if name.rpartition(".")[0] in beside else prefix + name: file for name, file in self._files.items()
        }
        return found

    def _stored(self, name: str) -> str:
        """A tensor's name in its file."""
        own = name.removeprefix(self._prefix)
        return own if own in self._files[name].tensors else name

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._files

    def info(self, name: str) -> TensorInfo:
        return self._files[name].tensors[self._stored(name)]

    def load(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read a tensor, into ``out``, if that is given.

        Raises:
            SmeltError: it cannot be read, or holds NaN or infinite values.
        """
        return self._checked(name, self._files[name].load(self._stored(name), out=out))

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if not _is_finite(name, tensor):
            raise SmeltError(
                f"{self._files[name].path}: {name} holds NaN or infinite weights; the checkpoint is broken,"
                " get another copy"
            )
        return tensor

    def load_part(
        self, name: str, rows: Sequence[range] | None = None, columns: Sequence[range] | None = None
    ) -> Tensor:
        """Read some rows, or columns, of a tensor, and nothing else.

        Raises:
            SmeltError: they cannot be read, or hold NaN or infinite values.
        """
        return self._checked(name, self._files[name].load_part(self._stored(name), rows, columns))

    @property
    def nbytes(self) -> int:
        return sum(self.info(name).nbytes for name in self._files)

    def fingerprint(self) -> str:
        """A digest of the headers and of the first and last megabyte of every file: quick, and enough to notice a change."""
        digest = hashlib.sha256()
        for file in sorted({id(f): f for f in self._files.values()}.values(), key=lambda f: f.path.name):
            digest.update(file.path.name.encode() + file.header)
            with file.path.open("rb") as stream:
                size = file.path.stat().st_size
                digest.update(size.to_bytes(8, "little") + stream.read(1 << 20))
                stream.seek(max(0, size - (1 << 20)))
                digest.update(stream.read())
        return digest.hexdigest()

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same; a part at a time."""
        a, b = self.info(one), self.info(other)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        parts = [range(start, min(start + _ROWS, a.shape[0])) for start in range(0, a.shape[0], _ROWS)]
        return all(torch.equal(self.load_part(one, [part]), self.load_part(other, [part])) for part in parts)

    def content_digest(self) -> str:
        """A digest of every byte, for cases where two checkpoints that differ only in the middle must be distinguished."""
        digest = hashlib.sha256()
        for file in sorted({id(f): f for f in self._files.values()}.values(), key=lambda f: f.path.name):
            digest.update(file.path.name.encode() + bytes.fromhex(file_digest(file.path)))
        return digest.hexdigest()

    def _shards(self) -> dict[Path, list[str]]:
        index, single = self.directory / _INDEX, self.directory / _SINGLE
        if index.exists():
            shards: dict[Path, list[str]] = {}
            for name, file in _weight_map(index).items():
                shards.setdefault(self.directory / file, []).append(name)
            missing = [path.name for path in shards if not path.exists()]
            if missing:
                raise SmeltError(
                    f"{self.directory}: {', '.join(missing)} is missing, though {_INDEX} names it; download it"
                )
            return dict(sorted(shards.items()))
        if single.exists():
            return {single: []}
        others = sorted(self.directory.glob("*.safetensors"))
        if others:
            raise SmeltError(
                f"{self.directory}: holds {others[0].name} but neither {_SINGLE} nor {_INDEX}; download the missing file"
            )
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(self.directory.glob(pattern))]
        if pickles:
            raise SmeltError(
                f"{self.directory}: its weights are only in pickle files ({pickles[0]}), which can run code when opened;"
                " convert them to safetensors first"
            )
        raise SmeltError(f"{self.directory}: has no safetensors weights ({_SINGLE}); check the path")


def _weight_map(index: Path) -> dict[str, str]:
    """Each tensor's shard by the tensor's name; a shard must be a file in the index's directory."""
    weight_map = read_json(index, "the names of tensors and shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SmeltError(f"{index}: its weight_map does not map tensors to shards; download it again")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.isprintable() and file.endswith(".safetensors")
        if not plain or "\\" in file or PurePosixPath(file).name != file:
            raise SmeltError(
                f"{index}: maps {name!r} to {file!r}, which is not a .safetensors file in this directory; download it"
                " again"
            )
    return weight_map


def _is_finite(name: str, tensor: Tensor) -> bool:
    """Whether all values of a stored tensor are finite, including 8-bit floats; integers always are."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        return _largest_magnitude(tensor) < 0x7F
    if tensor.dtype == torch.float8_e5m2:
        return _largest_magnitude(tensor) < 0x7C
    if tensor.dtype == torch.float8_e8m0fnu or (tensor.dtype == torch.uint8 and name.endswith(".weight_scale")):
        return bool(tensor.view(torch.uint8).amax() < 0xFF)  # MXFP4's scales are powers of two; 255 is NaN
    if not tensor.is_floating_point():
        return True
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _largest_magnitude(tensor: Tensor) -> int:
    """The largest bit pattern of 8-bit floats without signs; in pieces, so that temporaries stay in the cache."""
    return max(int((piece & 0x7F).amax()) for piece in tensor.reshape(-1).view(torch.int8).split(1 << 18))
