"""A server's log: as text for people, or as JSON for what collects it."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import Scope

from ...requests.output import RequestOutput

_LOG = logging.getLogger("smelt.serve.requests")
# What a request's log line is about; other attributes of a record are logging's own.
_FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """A record, with the fields of its request if it is about one."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_to(stream: TextIO, form: str) -> None:
    """Let everything that is logged from now on go to a stream.

    Args:
        stream: such as standard error.
        form: ``text`` or ``json``.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s smelt: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


_LONGEST_ERROR = 200  # characters: a message may repeat what a client sent


class RequestLog:
    """Logs a request when it has been answered."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def write(self, scope: Scope, status: int | None) -> None:
        """Log it.

        Args:
            scope: of the request; its state has its id, and perhaps its model and outputs.
            status: of the response; None if the client had gone before.
        """
        state = scope["state"]
        fields: dict[str, Any] = {
            "request_id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(time.perf_counter() - self._began, 4),
        }
        fields |= answered(state)
        problem = state.get("problem")
        if problem is not None:
            fields |= {
                "error": problem.message[:_LONGEST_ERROR],
                **({"error_code": problem.code} if problem.code else {}),
            }
        level = logging.INFO if status is None or status < 500 else logging.WARNING
        if _LOG.isEnabledFor(level):
            # A path may have any characters, which must not look like lines of the log.
            text = " ".join(
                f"{name}={value if isinstance(value, int | float) else json.dumps(value)}"
                for name, value in fields.items()
            )
            _LOG.log(level, "%s", text, extra={_FIELDS: fields})


def answered(state: dict[str, Any]) -> dict[str, Any]:
    """What a request's state says of its answer: its model, and numbers of tokens; from a replica, what that has said."""
    found: dict[str, Any] = dict(state.get("answered", {}))
    if "served" in state:
        found["model"] = state["served"]
    running = state.get("running")
    return found if running is None else found | _numbers(running.known)


def _numbers(outputs: list[RequestOutput]) -> dict[str, Any]:
    completions = [completion for output in outputs for completion in output.outputs]
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "draft_tokens": sum(output.draft_tokens for output in outputs),
        "accepted_tokens": sum(output.accepted_tokens for output in outputs),
        **({"upper_bits": True} if any(output.upper_bits for output in outputs) else {}),
        "completion_tokens": sum(len(completion.token_ids) for completion in completions),
        "finish_reasons": sorted({completion.finish_reason or "abort" for completion in completions}),
    }
