"""Names that a user gave for files and directories, checked before anything is asked of the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import SmeltError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_problem(name: str | Path) -> str | None:
    """Why no file can have this name; None if one can, whether it is there or not."""
    text = str(name)
    if not text:
        return "the path is empty"
    shown = text if len(text) <= 60 else f"{text[:40]}…{text[-10:]}"
    try:
        os.stat(os.fspath(Path(text).expanduser()))
    except RuntimeError:
        return f"{shown}: user {text.split('/')[0].removeprefix('~')!r} not found; write the full path"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeError:
        return f"{text.encode(errors='replace').decode()}: its name is not UTF-8; rename the file"
    except ValueError:
        return f"{text!r}: a path cannot hold a NUL character; remove it"
    except OSError as error:
        return f"{shown}: cannot be looked up ({error.strerror}); give another path"
    return None


def named_path(name: str | Path) -> Path:
    """The path that a user wrote, with a leading ``~`` written out.

    Raises:
        SmeltError: no file can have that name.
    """
    problem = path_problem(name)
    if problem is not None:
        raise SmeltError(problem)
    return Path(name).expanduser()


def irregular(path: Path) -> str | None:
    """What a path names instead of a file that can be read to its end, such as ``a FIFO``; None for files and for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None
