"""Directories that commands make of a checkpoint: never half there, and never over what is not theirs."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SmeltError
from ..hardware.machine import human_bytes
from ..hardware.resources import free_disk
from .files import disk_error
from .paths import named_path

RECORD = "smelt.json"
_COMMANDS = ("merge", "export")
# What a name gets while its directory is put together, and while it is replaced.
_STAGING, _EARLIER, _LOCK = ".partial", ".replaced", ".lock"


def check_output(
    output: Path, source: Path, command: str, *, fresh: bool, made_file: Callable[[Path], bool] | None = None
) -> None:
    """Refuse an output that stands in the way.

    Args:
        output: the new directory.
        source: the checkpoint that it is made of.
        command: which command makes it; its name is a key of the directory's ``smelt.json``.
        fresh: whether what the same command left there may be replaced.
        made_file: whether the command wrote a file, of those that it writes instead of a directory.

    Raises:
        SmeltError: it may not be written.
    """
    if not output.name:
        raise SmeltError(f"--output: {output} does not name a new directory or file; give one")
    named_path(output.with_name(output.name + _EARLIER))
    if output.resolve() == source.resolve():
        raise SmeltError(f"--output: {output} is the checkpoint itself; choose another")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not fresh:
        raise SmeltError(
            f"--output: {output} exists; choose another, or pass --fresh to replace what an earlier {command} left there"
        )
    if not (_made_by(command, output) or (made_file is not None and output.is_file() and made_file(output))):
        raise SmeltError(f"--output: {output} was not made by `smelt {command}`; choose another or remove it yourself")


def check_room(output: Path, size: int) -> None:
    """Refuse to begin what the disk has no room for.

    Args:
        output: what is to be written.
        size: its bytes.

    Raises:
        SmeltError: fewer are free.
    """
    free = free_disk(output)
    if size > free:
        raise SmeltError(
            f"{output}: {human_bytes(size)} are needed and {human_bytes(free)} are free; make room or choose another"
        )


@contextmanager
def appearing(output: Path, size: int) -> Iterator[Path]:
    """Where to put a directory together; it appears as ``output`` when all went well, and is gone if not.

    What an earlier command left there stays until then.

    Args:
        output: the new directory.
        size: bytes of its tensors.
    """
    check_room(output, size)
    staging = output.with_name(output.name + _STAGING)
    with alone(output):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            yield staging
            _publish(staging, output)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Keep other processes from writing the same output meanwhile.

    Raises:
        SmeltError: one is doing so.
    """
    lock = output.with_name(output.name + _LOCK)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise disk_error(error, output, 0) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SmeltError(f"--output: another command is writing {output}; wait for it, or choose another") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _made_by(command: str, output: Path) -> bool:
    """Whether it was the last of the commands that keep the record of what they were given."""
    try:
        commands = [key for key in json.loads((output / RECORD).read_text(encoding="utf-8")) if key in _COMMANDS]
    except (OSError, ValueError):
        return False
    return commands[-1:] == [command]


def _publish(staging: Path, output: Path) -> None:
    earlier = output.with_name(output.name + _EARLIER)
    try:
        shutil.rmtree(earlier, ignore_errors=True)
        if output.exists():
            output.rename(earlier)
        try:
            staging.rename(output)
        except OSError:
            if earlier.exists():
                earlier.rename(output)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, output, 0) from None
