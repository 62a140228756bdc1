"""How a server listens, and what it lets a request cost."""

from __future__ import annotations

from dataclasses import dataclass

from ....system.errors import RuntimeProblem

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server's options.

    Attributes:
        host, port: where it listens; only this machine reaches the default.
        api_keys: any of which a request must have; none are needed if there are none.
        admin_keys: any of which a request that loads or unloads models must have; there are no such requests if there are none.
        allowed_origins: web pages of which origins may call it; none by default.
        max_body_bytes: of a request.
        max_requests: the most requests that wait for the engine or run; others get 429.
        drain_seconds: how long running requests may take when the server is stopped.
        log_requests: whether each request is logged when it has been answered.
        log_format: ``text``, or ``json`` with an object a line.
        metrics_prefix: before the names of metrics; ``vllm`` for dashboards and gateways that expect vLLM.
        otlp_endpoint: the URL that takes traces by OTLP over HTTP, such as http://localhost:4318/v1/traces; none are sent by default.

    Raises:
        RuntimeProblem: a value is invalid.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_requests: int = 1024
    drain_seconds: float = 30.0
    log_requests: bool = True
    log_format: str = "text"
    metrics_prefix: str = "smelt"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        rules = {
            "port": 0 <= self.port < 1 << 16,
            "max_body_bytes": self.max_body_bytes >= 1,
            "max_requests": self.max_requests >= 1,
            "drain_seconds": self.drain_seconds >= 0,
        }
        for name, holds in rules.items():
            if not holds:
                raise RuntimeProblem(f"{name} is {getattr(self, name)}; it must be at least 1 and possible")
        if not all((*self.api_keys, *self.admin_keys)):
            raise RuntimeProblem("an API key is empty; give one with characters, or none")
        if self.log_format not in LOG_FORMATS:
            raise RuntimeProblem(f"log_format is {self.log_format!r}; it must be {' or '.join(LOG_FORMATS)}")
        if not self.metrics_prefix.isidentifier():
            raise RuntimeProblem(f"metrics_prefix is {self.metrics_prefix!r}; it must be a name such as smelt or vllm")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise RuntimeProblem(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://localhost:4318/v1/traces"
            )
