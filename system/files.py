"""Files that appear all at once, and the sentence for one that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import SmeltError


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it appears all at once."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path, len(text)) from None


def disk_error(error: OSError, path: Path, needed: int) -> SmeltError:
    """The sentence for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = "the file-size limit is reached" if error.errno == errno.EFBIG else "the disk is full"
        return SmeltError(
            f"{path}: {what} ({needed / 1e6:.1f} MB were needed); make room or choose another output, then run the same command"
        )
    return SmeltError(f"{path}: cannot be written ({error.strerror}); check the output directory's permissions")
