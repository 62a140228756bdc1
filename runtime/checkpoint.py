"""Opening a Hugging Face directory and reading its weights, in whatever format they are stored."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .cache_scheme import cache_args
from .errors import RuntimeProblem
from .matrix import Matrix
from .stored import reader_of


class Checkpoint:
    """A directory with ``config.json`` and safetensors.

    Args:
        path: the directory.
        trust_remote_code: run the checkpoint's own Python for its config; refused unless asked for.

    Attributes:
        cache_args: how keys and values are rounded; None if they are not.
    """

    def __init__(self, path: str | Path, *, trust_remote_code: bool = False) -> None:
        self.path = Path(path).expanduser()
        if not (self.path / "config.json").is_file():
            raise RuntimeProblem(f"{self.path}: is not a model directory, it has no config.json")
        from transformers import AutoConfig

        try:
            raw = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            self.config: Any = AutoConfig.from_pretrained(
                self.path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().split("\n")[0]
            raise RuntimeProblem(f"{self.path}: its config.json cannot be used ({first})") from None
        self._open = ExitStack()
        self._home = self._files()
        self._reader = reader_of(raw.get("quantization_config"), self)
        self.cache_args = cache_args(raw.get("quantization_config"))

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        dtype = getattr(self.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def has(self, name: str) -> bool:
        """Whether a tensor is stored."""
        return name in self._home

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        if name not in self._home:
            raise RuntimeProblem(f"{self.path}: the checkpoint lacks {name}")
        try:
            return self._home[name].get_tensor(name)
        except SafetensorError as error:
            raise RuntimeProblem(f"{self.path}: {name} cannot be read ({error}); fetch the file again") from None

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        """The weight of linear ``name``, or of another kind of module, in the format it is stored in."""
        return self._reader.matrix(name, kind)

    def has_matrix(self, name: str) -> bool:
        """Whether linear ``name`` is stored, in any format."""
        return any(self.has(f"{name}.{kind}") for kind in ("weight", "weight_packed", "qweight"))

    def optional(self, name: str) -> Tensor | None:
        """A tensor, or None if it is not stored."""
        return self.tensor(name) if self.has(name) else None

    def close(self) -> None:
        """Let go of the files. Tensors that were read stay."""
        self._open.close()

    def _files(self) -> dict[str, Any]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            try:
                names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError):
                raise RuntimeProblem(f"{index}: is damaged; fetch it again") from None
        elif (self.path / "model.safetensors").is_file():
            names = {}
        else:
            pickled = (
                "; pickle files are not loaded, convert them to safetensors" if any(self.path.glob("*.bin")) else ""
            )
            raise RuntimeProblem(f"{self.path}: has no model.safetensors{pickled}")
        home: dict[str, Any] = {}
        for file in sorted(set(names.values())) or ["model.safetensors"]:
            opened = self._opened(self.path / file)
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if name in home:
                    raise RuntimeProblem(f"{self.path}: {name} is in two shards; they do not belong together")
                home[name] = opened
        missing = [name for name in names if name not in home]
        if missing:
            raise RuntimeProblem(
                f"{self.path}: the index names {missing[0]}, which its shard {names[missing[0]]} lacks; the shards do not belong together"
            )
        return home

    def _opened(self, file: Path) -> Any:
        if not file.is_file():
            raise RuntimeProblem(f"{file}: the shard is missing; fetch it")
        try:
            return self._open.enter_context(safe_open(file, framework="pt"))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise RuntimeProblem(f"{file}: is damaged or truncated ({error}); fetch it again") from None
