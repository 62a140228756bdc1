"""Fetches the wheels that a GPU machine without a network lacks: what Smelt imports besides torch, triton and transformers.

python -m benchmarks.gpu.wheels FOLDER [--python 3.12] [--machine x86_64]

About 3 MB. There: `python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl`, and SITE in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

# What nothing else on such a machine brings along; their versions are this environment's.
PACKAGES = (
    "compressed-tensors",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "loguru",
)
_GLIBC = (17, 24, 27, 28, 31, 34)


def command(folder: Path, python: str, machine: str) -> list[str]:
    """pip's."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC] + [f"manylinux2014_{machine}"]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", python, "--implementation", "cp", "--dest", str(folder)),
        *(part for platform in platforms for part in ("--platform", platform)),
        *(f"{name}=={version(name)}" for name in PACKAGES),
    ]


def unlisted() -> set[str]:
    """What a listed package needs that is neither listed nor on a machine with torch and transformers."""
    there = {"torch", "transformers", "numpy", "safetensors", "packaging", "tqdm", "pyyaml", "psutil", "accelerate"}
    needed = set()
    for name in PACKAGES:
        for requirement in requires(name) or []:
            text, _, marker = requirement.partition(";")
            if "extra" not in marker and "win32" not in marker and "python_version" not in marker:
                needed.add(re.split(r"[^A-Za-z0-9_.-]", text.strip(), maxsplit=1)[0].lower().replace("_", "-"))
    return needed - set(PACKAGES) - there


def main() -> None:
    """Fetch them, and say what they weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--machine", default="x86_64")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = subprocess.run(command(given.folder, given.python, given.machine), check=False).returncode
    if failed:
        sys.exit(f"pip could not fetch all of {', '.join(PACKAGES)}")
    found = sorted(given.folder.glob("*.whl"))
    for wheel in found:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in found) / 1e6:6.2f} MB in {given.folder}")


if __name__ == "__main__":
    main()
