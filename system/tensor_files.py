"""Reading and writing safetensors files without holding or mapping more than one tensor.

The safetensors library maps a whole file as private memory (which counts against data limits) and
writes from a dict that holds every tensor. Streaming needs neither, and the format is a JSON header
and bytes, so this module speaks it directly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import SmeltError
from .files import disk_error

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description in a file's header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One safetensors file, opened for reading; its size is checked against its header at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                self.header = self._read_header(file.read(8), file.read, size)
        except OSError as error:
            raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None

    def load(self, name: str, rows: slice | None = None) -> Tensor:
        """Read one tensor, or those of its rows from ``rows.start`` to ``rows.stop``."""
        info, offset = self.tensors[name], self._offsets[name]
        if rows is not None:
            row = TensorInfo(info.dtype, info.shape[1:])
            info, offset = (
                TensorInfo(info.dtype, (rows.stop - rows.start, *info.shape[1:])),
                offset + rows.start * row.nbytes,
            )
        tensor = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        if info.nbytes == 0:
            return tensor
        target = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore
        with self.path.open("rb", buffering=0) as file:
            done = 0
            while done < info.nbytes:
                read = os.preadv(file.fileno(), [target[done:]], offset + done)
                if read == 0:
                    raise SmeltError(f"{self.path}: the file ends inside {name}; it was cut off, copy it again")
                done += read
        return tensor

    def _read_header(self, prefix: bytes, read: Callable[[int], bytes], size: int) -> bytes:
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise SmeltError(
                f"{self.path}: not a whole safetensors file (its header is cut off); copy or download it again"
            )
        raw = read(length)
        try:
            header = json.loads(raw)
            self.metadata = header.pop("__metadata__", {})
            end = 0
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                self.tensors[name] = TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
                self._offsets[name] = 8 + length + start
                if stop - start != self.tensors[name].nbytes:
                    raise SmeltError(
                        f"{self.path}: {name} has {stop - start} bytes, not those of its shape; the file is damaged"
                    )
                end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SmeltError(f"{self.path}: its safetensors header cannot be understood ({error!r})") from None
        missing = 8 + length + end - size
        if missing > 0:
            raise SmeltError(
                f"{self.path}: the file is truncated ({missing} of {end} bytes are missing); copy or download it again"
            )
        return raw


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, TensorInfo, Callable[[], Tensor]]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file, asking for one tensor after another, and make it appear all at once.

    Args:
        path: the file; what stood there is replaced when the new file is complete and on the disk.
        tensors: name, description and a function that yields the tensor when it is its turn.
        metadata: strings kept in the header.
    """
    entries = list(tensors)
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for name, info, _ in entries:
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for name, info, load in entries:
                tensor = load().contiguous()
                if tensor.dtype != info.dtype or tuple(tensor.shape) != info.shape:
                    raise AssertionError(f"{name} is {tensor.dtype}{tuple(tensor.shape)}, announced as {info}")
                file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path, offset) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors that are in memory; see :func:`write_safetensors`."""
    entries = [(name, TensorInfo(t.dtype, tuple(t.shape)), lambda t=t: t) for name, t in tensors.items()]
    write_safetensors(path, entries, metadata)
