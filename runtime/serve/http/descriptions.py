"""Errors and streams in the server's OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong; OpenAI's form has ``param`` and ``code`` besides."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An error's body; Anthropic's form has ``type`` and ``request_id`` besides."""

    error: ErrorDetail
    type: Literal["error"] | None = None
    request_id: str | None = None


# For FastAPI, which would otherwise describe errors of its own.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    "5XX": {"model": ErrorBody, "description": "The request failed, or the server shuts down."},
}
# Beside the whole answer, as JSON.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": {"text/event-stream": {}}}}
