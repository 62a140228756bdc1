"""What this machine lets this process use."""

from __future__ import annotations

import os
import platform
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
    """Where this user's programs keep what can be made again: ``$XDG_CACHE_HOME/smelt``, or ``~/.cache/smelt``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt"


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
