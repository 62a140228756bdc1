"""Reading and writing safetensors files without holding or mapping more than one tensor.

The safetensors library maps a whole file as private memory (which counts against data limits) and
writes from a dict that holds every tensor. Streaming needs neither, and the format is a JSON header
and bytes, so this module speaks it directly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SmeltError
from ..hardware.pages import zeros_in_large_pages
from .files import check_regular, disk_error, parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 16
_PIECE = 1 << 22


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description in a file's header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One safetensors file, opened for reading.

    Its header is checked at once: names, types and shapes that there are, and bytes that cover the file without a hole
    or an overlap. So whatever a header says, a tensor's bytes are its own and are there.

    Raises:
        SmeltError: it is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        size = check_regular(path)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                    raise SmeltError(
                        f"{path}: incomplete safetensors file (its header is cut off); copy or download it again"
                    )
                self.header = file.read(length)
        except OSError as error:
            raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None
        try:
            end = self._read(parse_json(self.header, "tensors' names"), 8 + length)
        except ValueError as error:
            raise SmeltError(f"{path}: its safetensors header is invalid: {error}; download the file again") from None
        missing = 8 + length + end - size
        if missing > 0:
            raise SmeltError(
                f"{path}: the file is truncated ({missing} of {end} bytes are missing); copy or download it again"
            )
        if missing < 0:
            raise SmeltError(f"{path}: {-missing} bytes at its end belong to no tensor; copy or download it again")

    def load(self, name: str, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
        """Read one tensor, or those of its rows from ``rows.start`` to ``rows.stop``; into ``out``, if that is given."""
        info, offset = self.tensors[name], self._offsets[name]
        if rows is not None:
            row = TensorInfo(info.dtype, info.shape[1:])
            info, offset = (
                TensorInfo(info.dtype, (rows.stop - rows.start, *info.shape[1:])),
                offset + rows.start * row.nbytes,
            )
        tensor = zeros_in_large_pages(info.shape, info.dtype) if out is None else out
        if info.nbytes == 0:
            return tensor
        # Memory that is touched for the first time costs more than what is then read to it; torch's threads share that.
        tensor.zero_()
        self._fill(name, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), [(offset, info.nbytes)])  # type: ignore
        return tensor

    def load_part(
        self, name: str, rows: Sequence[range] | None = None, columns: Sequence[range] | None = None
    ) -> Tensor:
        """Read some of a tensor's first dimension, or of its second; no other bytes are read.

        Args:
            name: of the tensor.
            rows: of the first dimension, one after another; None for all.
            columns: of the second; None for all.
        """
        info, begin = self.tensors[name], self._offsets[name]
        height, *rest = info.shape
        size = TensorInfo(info.dtype, tuple(rest)).nbytes
        chosen = [range(height)] if rows is None else rows
        if columns is None:
            shape, places = tuple(rest), [(begin + each.start * size, len(each) * size) for each in chosen]
        else:
            width = size // rest[0] if rest[0] else 0
            shape = (sum(map(len, columns)), *rest[1:])
            places = [
                (begin + row * size + each.start * width, len(each) * width)
                for some in chosen
                for row in some
                for each in columns
            ]
        tensor = zeros_in_large_pages((sum(map(len, chosen)), *shape), info.dtype)
        if tensor.numel():
            self._fill(name, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), places)  # type: ignore
        return tensor

    def pieces(self) -> Iterator[tuple[str, bytes]]:
        """All bytes of the file in order, each piece with the tensor it belongs to; the header's with an empty name."""
        in_order = sorted(self.tensors, key=lambda name: (self._offsets[name], self.tensors[name].nbytes))
        sizes = [("", 8 + len(self.header)), *((name, self.tensors[name].nbytes) for name in in_order)]
        try:
            with self.path.open("rb") as file:
                for name, size in sizes:
                    left = size
                    while left:
                        piece = file.read(min(left, _PIECE))
                        if not piece:
                            raise SmeltError(
                                f"{self.path}: the file ends inside {name}; it is truncated, copy it again"
                            )
                        left -= len(piece)
                        yield name, piece
        except OSError as error:
            raise SmeltError(f"{self.path}: cannot be read ({error.strerror}); check the disk") from None

    def _fill(self, name: str, target: memoryview, places: Iterable[tuple[int, int]]) -> None:
        """Read bytes, each so many from an offset on, one after another into memory."""
        done = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                for offset, count in places:
                    end = done + count
                    while done < end:
                        read = os.preadv(file.fileno(), [target[done:end]], offset + count - (end - done))
                        if read == 0:
                            raise SmeltError(
                                f"{self.path}: the file ends inside {name}; it is truncated, copy it again"
                            )
                        done += read
        except OSError as error:
            raise SmeltError(f"{self.path}: {name} cannot be read ({error.strerror}); check the disk") from None

    def _read(self, header: dict[str, Any], begin: int) -> int:
        """Note what a header says; returns how many bytes its tensors have."""
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ must hold strings")
        self.metadata = metadata
        places: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            if not name.isprintable():
                raise ValueError(f"a tensor is called {name!r}")
            info, start, stop = _described(name, entry)
            self.tensors[name], self._offsets[name] = info, begin + start
            places.append((start, stop, name))
        end, before = 0, ""
        for start, stop, name in sorted(places):
            if start < end:
                raise ValueError(f"{name} and {before} share bytes")
            if start > end:
                raise ValueError(f"{start - end} bytes before {name} belong to no tensor")
            end, before = stop, name
        return end


def _described(name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """One tensor of a header, and where its bytes begin and end."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} lacks a dtype, a shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, which is not one of {', '.join(_DTYPES)}")
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 1 << 60:
        raise ValueError(f"{name} has a shape that is not a list of up to {_MOST_DIMENSIONS} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name} has data_offsets that are not two offsets in ascending order")
    info = TensorInfo(_DTYPES[dtype], tuple(shape))
    start, stop = offsets
    if stop - start != info.nbytes:
        raise ValueError(f"{name} has {stop - start} bytes, which does not match its shape")
    return info, start, stop


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


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
