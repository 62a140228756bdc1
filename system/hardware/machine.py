"""What this machine lets this process use."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> int:
    """Bytes that this process may still allocate, under whichever limit is tightest."""
    process = psutil.Process()
    free = [psutil.virtual_memory().available]
    used = process.memory_info()
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            free.append(max(0, int(limit) - used.rss))
    try:
        import resource

        for kind, held in ((resource.RLIMIT_DATA, _data_bytes()), (resource.RLIMIT_AS, used.vms)):
            limit_bytes = resource.getrlimit(kind)[0]
            if limit_bytes != resource.RLIM_INFINITY:
                free.append(max(0, limit_bytes - held))
    except ImportError:  # no such limits outside Unix
        pass
    return min(free)


def processor_name() -> str:
    """The processor's model, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_directory() -> Path:
    """Where this user's programs keep what can be made again: ``$XDG_CACHE_HOME/smelt``, or ``~/.cache/smelt``.

    Where there is no home, or it cannot be written, as in many containers: a directory of this user's own for temporary files.
    """
    usual = usual_cache_directory()
    return usual if usual is not None and _can_be_written(usual) else _own_temporary_directory()


def usual_cache_directory() -> Path | None:
    """The same, whether or not it can be written; None for a user without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt"
    return None


def _can_be_written(path: Path) -> bool:
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        return path.is_dir() and os.access(path, os.W_OK)
    except OSError:
        return False


def _own_temporary_directory() -> Path:
    """What is kept there is loaded as code: nobody else may have made it, or write to it."""
    with suppress(OSError):
        path = Path(tempfile.gettempdir()) / f"smelt-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    return _another_directory()


@functools.cache
def _another_directory() -> Path:
    found = tempfile.TemporaryDirectory(prefix="smelt-")
    atexit.register(found.cleanup)
    return Path(found.name)


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _data_bytes() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return psutil.Process().memory_info().rss
