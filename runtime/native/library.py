"""The compiled kernels: built once and cached, unavailable where they cannot be built or run."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from ...system.hardware.machine import cache_directory, usual_cache_directory
from ...system.progress import Log

_NAME = "smelt_native"
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++20", "-fno-math-errno")
_LONGEST_REASON = 200  # characters
_NEEDED = ("avx2", "bmi2", "f16c", "fma")


class Verdict(enum.IntEnum):
    """The exit status of the AMX trial; others mean that the process crashed."""

    RIGHT = 0
    WRONG = 64
    REFUSED = 65
    ONLY_CODES = 66


_VERDICTS = {Verdict.RIGHT: "right", Verdict.WRONG: "wrong", Verdict.ONLY_CODES: "codes"}  # as they are kept


@functools.cache
def processor_features() -> frozenset[str]:
    """This processor's instruction sets, by Linux's names; empty where unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


@functools.cache
def _flags() -> tuple[str, ...]:
    """For the compiler; caches of AMD's processors want to be asked in another way."""
    with contextlib.suppress(OSError):
        if "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            return (*_FLAGS, "-DSMELT_AMD")
    return _FLAGS


def has_needed() -> bool:
    """Whether this processor has what the compiled kernels need."""
    return not _missing()


def _missing() -> list[str]:
    return [name for name in _NEEDED if name not in processor_features()]


def kernels(log: Log) -> ModuleType | None:
    """The compiled kernels, or None with a log message that says why and what is used instead.

    They are compiled at the first call on a machine, which takes half a minute, and cached in
    ``$XDG_CACHE_HOME/smelt`` (``~/.cache/smelt``) for later runs.
    """
    missing = _missing()
    if missing:
        log(f"this processor has no {', '.join(missing)}: using torch's operators instead of Smelt's kernels")
        return None
    try:
        return _loaded(log)
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        log(
            f"Smelt's kernels cannot be compiled here ({_reason(error)}): using torch's operators instead, which are slower; {_advice(error)}"
        )
        return None


def _advice(error: BaseException) -> str:
    if "Python.h" in str(error):
        return "install Python's headers (python3-dev)"
    compiler = os.environ.get("CXX", "c++")
    return "a C++ compiler is needed" if shutil.which(compiler) is None else f"{compiler} is there, but cannot do it"


def _reason(error: BaseException) -> str:
    """Of what a build printed, the line that says why it failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The first lines are the compiler's command.
    telling = [line for line in lines if re.search(r"\berror: |not found|No such file", line)]
    compiler = f", with CXX={os.environ['CXX']}" if "CXX" in os.environ else ""
    return f"{(telling or lines[-1:])[0][:_LONGEST_REASON]}{compiler}"


_found: ModuleType | None = None


def _loaded(log: Log) -> ModuleType:
    global _found  # noqa: PLW0603 - a process can load an extension only once
    if _found is None:
        kept = _kept()
        if not kept.is_file():
            log("compiling Smelt's CPU kernels (once; half a minute)")
            _build(kept)
        found = imported(kept)
        if "amx_int8" in processor_features() and (right := _right_tiles(kept, log)) != "none":
            found.use_tiles(dense=right == "all")
        _found = found
    return _found


def _kept() -> Path:
    """Where the compiled kernels are, or are to be."""
    usual, name = usual_cache_directory(), Path(_key()) / f"{_NAME}.so"
    if usual is not None and (usual / name).is_file():  # also where nothing can be written
        return usual / name
    return cache_directory() / name


def _right_tiles(kept: Path, log: Log) -> str:
    """Which products AMX tiles compute as they should, ``all``, ``codes`` or ``none``; tried once, in a separate process."""
    verdict = kept.with_name("tiles")
    if verdict.is_file():
        found = verdict.read_text(encoding="utf-8")
    else:
        found = _tiles_tried(kept)
        if found in _VERDICTS.values():
            with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
                file.write(found)
                file.flush()
                os.replace(file.name, verdict)
    if found == "right":
        return "all"
    if found == "codes":
        log(
            "this processor's matrix tiles multiply bfloat16 in another way than expected: using them for quantized weights only"
        )
        return "codes"
    why = "give wrong results" if found == "wrong" else f"could not be tried ({found})"
    log(f"this processor's matrix tiles {why}: using vector instructions instead")
    return "none"


def _tiles_tried(kept: Path) -> str:
    """``right``, ``codes``, ``wrong``, or why it is not known, which may change the next time."""
    command = [sys.executable, "-m", "smelt.runtime.native.try_tiles", str(kept)]
    try:
        code = subprocess.run(command, check=False, capture_output=True, timeout=300).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    if code in _VERDICTS:
        return _VERDICTS[Verdict(code)]
    if code == Verdict.REFUSED:
        return "the operating system does not allow them"
    return "wrong" if -code in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS) else f"exit status {code}"


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.cpp"))


def _key() -> str:
    """A key of everything that the compiled code depends on."""
    digest = hashlib.blake2b(digest_size=12)
    for path in (*_sources(), *sorted(_HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    about = (_flags(), torch.__version__, sys.version, platform.machine(), sorted(processor_features()))
    digest.update(repr(about).encode())
    return digest.hexdigest()


def _build(target: Path) -> None:
    """Compile in a temporary directory and move the result into place, so that concurrent builds do not conflict."""
    from torch.utils import cpp_extension

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    try:
        cpp_extension.load(
            _NAME,
            [str(path) for path in _sources()],
            extra_cflags=list(_flags()),
            extra_ldflags=["-fopenmp"],
            build_directory=str(scratch),
            is_python_module=False,
        )
        built = scratch / f"{_NAME}.so"
        with built.open("rb") as file:
            os.fsync(file.fileno())  # a power cut would leave a file that ends every process that loads it
        os.replace(built, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def imported(path: Path) -> ModuleType:
    """The compiled module in a file."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
