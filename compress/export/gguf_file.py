"""Writing a GGUF file tensor by tensor, without knowing their types beforehand."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, GGUFWriter

from ...system.storage.files import disk_error
from ...system.storage.new_directory import alone

# The first field after the architecture: it marks the file as ours, so that --fresh may replace it.
WRITTEN_BY = {"general.quantized_by": "Smelt"}
_BEGINNING = 4096


def written_by_smelt(path: Path) -> bool:
    """Whether a file is one that :class:`GgufFile` wrote with :data:`WRITTEN_BY` as its first fields."""
    ((key, value),) = WRITTEN_BY.items()
    mark = key.encode() + struct.pack("<IQ", GGUFValueType.STRING, len(value)) + value.encode()
    try:
        with path.open("rb") as file:
            start = file.read(_BEGINNING)
    except OSError:
        return False
    return start.startswith(b"GGUF") and mark in start


# A tensor's name, its bytes in pieces, its shape, and its type.
Written = tuple[str, Sequence[np.ndarray], tuple[int, ...], GGMLQuantizationType]


class GgufFile:
    """A file that appears when it is complete.

    The header holds every tensor's type, which is known only once the tensor is read. Its length depends only on names,
    dimensions and fields, so a placeholder header is written first and replaced at the end.

    Args:
        target: the file.
        arch: llama.cpp's name of the architecture.
        fields: everything but tensors; a number may still change until the last tensor is written.
        tensors: the name of each tensor, in order, and how many dimensions it has.
    """

    def __init__(self, target: Path, arch: str, fields: dict[str, Any], tensors: dict[str, int]) -> None:
        self._target, self._arch, self._fields = target, arch, fields
        self._names = list(tensors)
        self._known: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        whole = target.resolve()
        self._partial = whole.with_name(whole.name + ".partial")
        held = {name: ((1,) * count, GGMLQuantizationType.F32, 4) for name, count in tensors.items()}
        self._header_size = len(self._header(held))
        self.nbytes = 0

    def write(self, tensors: Iterable[Written]) -> None:
        """Write all tensors, and let the file appear."""
        with alone(self._target):
            self._write(tensors)

    def _write(self, tensors: Iterable[Written]) -> None:
        try:
            with self._partial.open("wb") as file:
                file.seek(_padded(self._header_size))
                for name, pieces, shape, kind in tensors:
                    self._known[name] = (shape, kind, sum(piece.nbytes for piece in pieces))
                    for piece in pieces:
                        file.write(np.ascontiguousarray(piece).data)
                    file.seek(_padded(file.tell()))
                assert list(self._known) == self._names
                header = self._header(self._known)
                assert len(header) == self._header_size
                file.truncate()
                self.nbytes = file.tell()
                file.seek(0)
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
            self._partial.replace(self._target.resolve())
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise disk_error(error, self._target, self.nbytes) from None
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise

    def _header(self, tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "header"
            writer = GGUFWriter(path, self._arch)
            for name, value in self._fields.items():
                _add(writer, name, value)
            for name, (shape, kind, size) in tensors.items():
                writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            return path.read_bytes()


_TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        assert value  # of an empty one nothing would be written
        writer.add_array(name, value)
    else:
        writer.add_key_value(name, value, _TYPES[type(value)])


def _padded(size: int) -> int:
    return -(-size // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT
