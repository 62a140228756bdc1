"""Running a sweep's trials on a Ray cluster with shared storage."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...system.errors import SmeltError, in_one_line
from .trial_run import run_trial
from .trials import Resources, Trial

_CONNECT_SECONDS = 15


def run_on_ray(
    trials: Sequence[Trial],
    completed: Callable[[Trial, str | None], None],
    shared: Path,
    fresh: bool,
    address: str,
    resources: Resources,
) -> None:
    """Run trials as tasks of Ray.

    Args:
        trials: what to run; their outputs must be on storage that all machines of the cluster share.
        completed: called when a trial ends, with the reason if it failed.
        shared: directory of the calibration text that all trials share.
        fresh: start over.
        address: of the cluster: ``auto``, ``ray://host:port`` and so on; ``local`` starts one here for this run.
        resources: of each trial.

    Raises:
        SmeltError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SmeltError("--ray needs Ray, which is not installed; run: pip install 'ray[serve]'") from None
    _refuse_what_does_not_answer(address)
    try:
        ray.init(
            address=None if address == "local" else address,
            log_to_driver=False,
            include_dashboard=False if address == "local" else None,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises from several libraries
        raise SmeltError(
            f"--ray {address}: cannot reach a Ray cluster ({in_one_line(error)}); check the address"
        ) from None
    running: dict[Any, Trial] = {}
    try:
        _refuse_what_never_fits(ray, resources)
        task = ray.remote(_run).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=resources.memory_bytes,
            max_retries=1,
        )
        running = {task.remote(trial, shared.resolve(), fresh): trial for trial in trials}
        waiting = list(running)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                problem = ray.get(done)
            except Exception as error:  # the task's machine died or ran out of memory
                problem = " ".join(str(error).split())[-300:]
            completed(running.pop(done), problem)
    finally:
        for task in running:
            ray.cancel(task, force=True)
        ray.shutdown()


def _run(trial: Trial, shared: Path, fresh: bool) -> str | None:
    return run_trial(trial, shared, fresh, False)


def _refuse_what_does_not_answer(address: str) -> None:
    """Fail early: Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SmeltError(f"--ray {address}: cannot reach a Ray cluster ({error}); check the address") from None


def _refuse_what_never_fits(ray: Any, resources: Resources) -> None:
    """Fail early: Ray would queue a task that fits on no machine forever."""
    largest = {
        name: max((node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]), default=0)
        for name in ("CPU", "GPU")
    }
    for name, wanted in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if wanted > largest[name]:
            raise SmeltError(
                f"sweep.resources: a trial requests {wanted:g} {name}s, but the largest machine of the cluster has"
                f" {largest[name]:g}; request fewer"
            )
