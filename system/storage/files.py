"""Files: read only if they are plain ones and hold what they should, written so that they appear all at once."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from ..errors import SmeltError

if TYPE_CHECKING:
    import numpy as np

# Real ones have kilobytes, a tokenizer's up to some tens of megabytes.
_LARGEST_JSON = 256 << 20


def check_regular(path: Path) -> int:
    """The size of a file, once it is known to be one: a FIFO would be waited for, and a device read without end.

    Raises:
        SmeltError: it is something else, or does not exist.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    except ValueError:  # a NUL in its name
        raise SmeltError(f"{str(path)!r}: is not a valid file name; check it") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a FIFO, socket or device"
        raise SmeltError(f"{path}: is {kind}, not a file; replace it with the file")
    return found.st_size


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        what: what it should hold, for the sentence if it does not.

    Raises:
        SmeltError: it cannot be read, or holds something else.
    """
    size = check_regular(path)
    if size > _LARGEST_JSON:
        raise SmeltError(f"{path}: has {size / 1e6:,.0f} MB, too large for {what}; get another copy")
    try:
        return parse_json(path.read_bytes(), what)
    except OSError as error:
        raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    except ValueError as error:
        raise SmeltError(f"{path}: {error}; get another copy") from None


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """The object that some JSON holds.

    Raises:
        ValueError: it is no JSON in UTF-8, is nested too deeply, or holds something else.
    """
    try:
        found = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}, not {what}")
    return found


def append_array(file: BinaryIO, array: np.ndarray) -> None:
    """Write an array's elements; unlike its own ``tofile``, which loses errors, this raises where the disk is full."""
    file.write(array.tobytes())


def flush_to_disk(file: IO[Any]) -> None:
    """Have all that was written to a file on the disk, or an error."""
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it appears all at once."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            flush_to_disk(file)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # of a file system that cannot be written
            partial.unlink(missing_ok=True)
        raise disk_error(error, path, len(text)) from None


def disk_error(error: OSError, path: Path, needed: int) -> SmeltError:
    """The sentence for a failed write.

    Args:
        error: why it failed.
        path: what was written.
        needed: how many bytes of room; 0 if that is not known.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = "the file-size limit is reached" if error.errno == errno.EFBIG else "the disk is full"
        size = f" ({needed / 1e6:.1f} MB were needed)" if needed else ""
        return SmeltError(f"{path}: {what}{size}; make room or choose another output, then run the same command")
    return SmeltError(
        f"{path}: cannot be written ({error.strerror or error}); check the output directory's permissions"
    )
