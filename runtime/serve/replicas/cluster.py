"""Replicas on Ray Serve: started here, or on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ....system.errors import RuntimeProblem
from ...engine.ranks.reserve import share_of
from ...engine.setup.config import EngineConfig
from ..http.config import ServerConfig
from .front import Front
from .replica import EngineReplica, LatestMetrics, ReplicaPlan

_LOG = logging.getLogger("smelt.serve")
# The least that Ray takes; requests are small.
_STORE_BYTES = 80 << 20
_VIRTUAL_NODES = 100
_HEALTH_SECONDS = 2.0
_END_SECONDS = 15.0
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@contextlib.contextmanager
def replicas(plan: ReplicaPlan, count: int, config: ServerConfig) -> Iterator[Front]:
    """Replicas that run while the block does, behind a front.

    Args:
        plan: what each serves; on this machine they share its memory and processors evenly.
        count: how many.
        config: of the front.

    Raises:
        RuntimeProblem: Ray Serve is not installed, the cluster does not answer, or the replicas cannot start.
    """
    # Before it is imported. Some of its ports listen on all interfaces, so that what comes needs this cluster's token.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]
        from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RuntimeProblem("replicas need Ray Serve, which is not installed; run pip install 'ray[serve]'") from None
    is_local = not os.environ.get("RAY_ADDRESS")
    name = f"smelt-{uuid.uuid4().hex[:8]}"
    try:
        ray.init(
            namespace=name,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(
                {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
                if is_local
                else {}
            ),
        )
    except Exception as error:  # Ray raises from several libraries
        first = " ".join(str(error).split())[:300]
        advice = "see its log under /tmp/ray" if is_local else "check RAY_ADDRESS"
        raise RuntimeProblem(f"cannot start or reach Ray ({first}); {advice}") from None
    has_failed = True
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        processors = _processors(
            [node["Resources"] for node in ray.nodes() if node["Alive"]], count, _gpus(plan.engine)
        )
        latest = ray.remote(LatestMetrics).options(num_cpus=0, max_restarts=-1).remote()
        if is_local:
            plan = replace(plan, engine=share_of(plan.engine, count * len(plan.models)), shares=1)
        served = _behind_the_front(config)
        deployment: Any = serve.deployment(
            name="engine",
            num_replicas=count,
            max_ongoing_requests=config.max_requests,
            graceful_shutdown_timeout_s=config.drain_seconds,
            health_check_period_s=_HEALTH_SECONDS,
            ray_actor_options=_resources(plan.engine, processors),
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER,  # pyright: ignore[reportArgumentType] - Ray's validator takes a name
                request_router_kwargs={"num_virtual_nodes": _VIRTUAL_NODES},
            ),
        )(EngineReplica)
        try:
            handle = serve.run(
                deployment.bind(replace(plan, config=served), latest), name=name, route_prefix=None, blocking=False
            )
        except Exception as error:
            raise RuntimeProblem(f"the replicas cannot start: {_reason(serve, name, error)}") from None
        yield Front(handle, latest, config, count)
        has_failed = False
    finally:
        _end(ray, serve, None if is_local else name, config.drain_seconds + _END_SECONDS, 1 if has_failed else 0)


def _gpus(engine: EngineConfig) -> int:
    """Of a replica: each of its ranks has one."""
    return 0 if engine.device == "cpu" else engine.ranks


def _processors(nodes: list[dict[str, float]], count: int, gpus: int) -> float:
    """The processors of each replica, so that all fit on the nodes.

    Raises:
        RuntimeProblem: they do not.
    """
    if gpus and sum(int(node.get("GPU", 0)) // gpus for node in nodes) < count:
        have = ", ".join(f"{int(node.get('GPU', 0))}" for node in nodes)
        raise RuntimeProblem(
            f"{count} replicas need {gpus} GPU{'s' * (gpus > 1)} each on one machine, and Ray knows of machines with {have or 'none'}"
        )
    have = [int(node.get("CPU", 0)) for node in nodes]
    for each in range(max(have, default=0), 0, -1):
        if sum(processors // each for processors in have) >= count:
            return float(each)
    raise RuntimeProblem(f"{count} replicas need a processor each, and Ray knows of {sum(have)}; lower --replicas")


def _end(ray: Any, serve: Any, name: str | None, seconds: float, status: int) -> None:
    """End the replicas; a cluster that is not ours goes on without them."""

    def work() -> None:
        # Ray prints that calls of the actors that it ends here have failed.
        with contextlib.redirect_stdout(io.StringIO()):
            if name is None:
                serve.shutdown()
            else:
                serve.delete(name)
            ray.shutdown()

    # A signal to the whole process group has ended Ray's own processes already, and Ray would look for them for a minute.
    ending = threading.Thread(target=work, daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
        problem = sys.exc_info()[1]
        _LOG.warning("Ray does not answer any more; leaving it%s", "" if problem is None else f" ({problem})")
        logging.shutdown()
        os._exit(status)


def _behind_the_front(config: ServerConfig) -> ServerConfig:
    """The options of a replica: the front has let a request in, and logs it."""
    return replace(config, api_keys=(), admin_keys=(), allowed_origins=(), log_requests=False)


def _resources(engine: EngineConfig, processors: float) -> dict[str, Any]:
    threads = {"env_vars": {"OMP_NUM_THREADS": str(int(processors))}}
    return {"num_cpus": processors, "num_gpus": _gpus(engine), "runtime_env": threads}


def _reason(serve: Any, name: str, error: Exception) -> str:
    """What a replica failed with, from the end of its traceback."""
    with contextlib.suppress(Exception):
        deployments = serve.status().applications[name].deployments
        text = next(iter(deployments.values())).message
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        problems = [line for line in lines if "Problem" in line or "Error" in line]
        return (problems or lines)[-1][:500]
    return " ".join(str(error).split())[:300]
