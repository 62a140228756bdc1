"""Running the recipes, each in a process of its own, and keeping what came out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .digests import digest, digests
from .models import MODELS, make_adapter, make_model
from .recipes import RECIPES, CheckedRun

SECONDS_ALLOWED = 1800


def run_all(names: list[str], output: Path, scratch: Path) -> int:
    """Run recipes that have no result yet, and keep the results; returns 1 if one failed."""
    environment = _environment(scratch)
    origin = _origin(scratch, environment)
    found: dict[str, Any] = {"origin": origin, "results": {}}
    if output.exists():
        found = json.loads(output.read_text())
        if found["origin"] != origin:
            sys.exit(f"{output} is of {found['origin']}, and this is {origin}: choose another output")
    results: dict[str, dict[str, Any]] = found["results"]
    print(f"Smelt of {origin['smelt']}", flush=True)
    made: set[str] = set()
    for name in names:
        job = RECIPES[name]
        model = Path(job.recipe["model"]).name
        asked = digest([asdict(job), MODELS.get(model)])
        kept = results.get(name)
        if kept is None or kept["asked"] != asked or kept["error"] is not None:
            if model in MODELS.keys() - made:
                make_model(scratch / "models" / model)
                made.add(model)
            if "adapter" in job.recipe:
                make_adapter(scratch / "models" / "adapter")
            results[name] = {"asked": asked, **run_job(job, scratch / name.replace(" ", "_"), environment)}
            _write(output, found)
            done = results[name]
            said = done["error"] or f"{len(done['files'])} files"
            print(f"{name}: {said}, {done['seconds']:.0f} s, of the processor {done['cpu_seconds']:.0f} s", flush=True)
    return int(any(results[name]["error"] is not None for name in names))


def _write(output: Path, found: dict[str, Any]) -> None:
    """All or nothing, so that whoever interrupts a run loses no result."""
    partial = output.with_name(output.name + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(output)


def run_job(job: CheckedRun, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a job's commands in a fresh directory: how long it took, its last error, and the digests of its files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text(json.dumps(job.recipe, indent=1))  # JSON is YAML
    begun, cpu_begun = time.perf_counter(), _cpu_seconds()
    error = None
    for command in job.commands:
        error = error or _error_of([sys.executable, "-m", "smelt.compress", *command], directory, environment)
    taken = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu_seconds() - cpu_begun}
    return {**taken, "error": error, "files": {} if error else digests(directory, job.published)}


def _cpu_seconds() -> float:
    """What the processes that have ended took of the processor."""
    times = os.times()
    return times.children_user + times.children_system


def _error_of(command: list[str], directory: Path, environment: dict[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_ALLOWED,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS_ALLOWED} s"
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return (said or [f"exit status {done.returncode}"])[-1] if done.returncode else None


def _environment(scratch: Path) -> dict[str, str]:
    """One thread, no network, no GPU; and a new cache, or what one version measured would be read by another."""
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }


_FIND = "import importlib.util as u; s = u.find_spec('smelt'); print(*(s and s.submodule_search_locations or [])[:1])"


def _origin(scratch: Path, environment: dict[str, str]) -> dict[str, str]:
    """Which Smelt the processes import, and what else decides its bytes."""
    import torch

    def said_by(*command: str) -> str:
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    scratch.mkdir(parents=True, exist_ok=True)
    place = said_by(sys.executable, "-c", _FIND)
    if not place:
        sys.exit("no package smelt: install it, or let PYTHONPATH name the directory that holds it")
    commit, changes = said_by("git", "-C", place, "describe", "--always"), said_by("git", "-C", place, "diff", "HEAD")
    if changes:
        commit += f" and changes {digest(changes)}"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "compressed-tensors")}
    vectors = torch.backends.cpu.get_cpu_capability()
    where = {"smelt": str(Path(place).resolve()), "commit": commit}
    return where | {"python": platform.python_version(), "vectors": vectors} | versions
