"""What vLLM says of checkpoints, by a process of the Python that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest


def vllm_python() -> str:
    """The Python that has it; skips the test where there is none."""
    python = os.environ.get("SMELT_VLLM_PYTHON")
    if not python:
        pytest.skip("set SMELT_VLLM_PYTHON to a Python that has vLLM for CPUs, or run `make test-vllm`")
    return python


def ask_vllm(place: Path, checkpoints: dict[str, Path], prompts: list[list[int]], count: int, **more: Any) -> Any:
    """Ask in one process; skips the test where there is no vLLM.

    Args:
        place: an empty directory.
        checkpoints: directories, by name.
        prompts: token ids.
        count: tokens to generate.
        more: see vllm_reads.py.

    Returns:
        The answer of each name, or ``{"refused": why}``.
    """
    python = vllm_python()
    request = {"checkpoints": {n: str(p) for n, p in checkpoints.items()}, "prompts": prompts, "count": count, **more}
    (place / "request.json").write_text(json.dumps(request | {"result": str(place / "result.json")}))
    script = Path(__file__).with_name("vllm_reads.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    # Elsewhere than in the repository, whose folders vLLM's own processes would import.
    done = subprocess.run(
        [python, script, place / "request.json"],
        check=False,
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
    )
    found = json.loads((place / "result.json").read_text())
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(found) == len(checkpoints)
    return found
