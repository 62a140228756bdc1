"""The weights of a model directory, found by name and read one at a time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..system.errors import SmeltError
from ..system.tensor_files import SafetensorsFile, TensorInfo

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Weights(Protocol):
    """Tensors by their names in a checkpoint."""

    def names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def load(self, name: str) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


class CheckpointWeights:
    """The safetensors files of a directory. Missing and truncated shards are errors here, not later."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        for path, expected in self._shards().items():
            file = SafetensorsFile(path)
            for name in file.tensors:
                self._files[name] = file
            lost = [name for name in expected if name not in file.tensors]
            if lost:
                raise SmeltError(f"{path}: the index promises {lost[0]} here, but the file lacks it; download it again")

    def names(self) -> list[str]:
        return list(self._files)

    def info(self, name: str) -> TensorInfo:
        return self._files[name].tensors[name]

    def load(self, name: str) -> Tensor:
        """Read a tensor. NaN and infinite weights are refused."""
        tensor = self._files[name].load(name)
        checked = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0
        if checked and not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise SmeltError(
                f"{self._files[name].path}: {name} holds NaN or infinite weights; the checkpoint is broken,"
                " get another copy"
            )
        return tensor

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

    def content_digest(self) -> str:
        """A digest of every byte, for what must not mistake one checkpoint for another that differs in its middle."""
        digest = hashlib.sha256()
        for file in sorted({id(f): f for f in self._files.values()}.values(), key=lambda f: f.path.name):
            digest.update(file.path.name.encode())
            with file.path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def _shards(self) -> dict[Path, list[str]]:
        index, single = self.directory / _INDEX, self.directory / _SINGLE
        if index.exists():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError):
                raise SmeltError(f"{index}: cannot be understood; download the model again") from None
            shards: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                shards.setdefault(self.directory / Path(file).name, []).append(name)
            missing = [path.name for path in shards if not path.exists()]
            if missing:
                raise SmeltError(
                    f"{self.directory}: {', '.join(missing)} is missing, though {_INDEX} names it; download it"
                )
            return shards
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
