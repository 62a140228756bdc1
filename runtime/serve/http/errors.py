"""What a client reads when a request cannot be served."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....system.errors import SmeltError


@dataclass
class ApiError(Exception):
    """A response with an error.

    Attributes:
        status: of HTTP.
        message: one sentence for the client's author.
        kind: OpenAI's ``type``.
        code: OpenAI's ``code``, if there is one for it.
        param: the field that is wrong.
        headers: to send besides.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def openai(self) -> dict[str, object]:
        """The body in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str) -> dict[str, object]:
        """The body in Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    408: "timeout_error",
}
# A queue moves on in about that time.
_RETRY_SECONDS = 1


def refused(problem: SmeltError, param: str | None = None) -> ApiError:
    """A request that the engine cannot serve, in the engine's words."""
    return ApiError(400, sentence(problem), param=param)


def beams_without_grammar() -> ApiError:
    """Beam search that should follow a grammar."""
    why = "Beam search follows no grammar; leave out use_beam_search, or response_format, structured_outputs, and tools that are required or strict."
    return ApiError(400, why, param="use_beam_search")


def too_long(prompt: int, wanted: int | None, longest: int) -> ApiError:
    """A prompt, or a prompt and what it asks for, that is longer than the model takes."""
    asked = f"{prompt} tokens" if wanted is None else f"{prompt} tokens and max_tokens is {wanted}"
    if wanted is None and prompt == longest:
        asked += ", which leaves no room for an answer"
    return ApiError(
        400,
        f"This model's maximum context length is {longest} tokens, and the prompt has {asked}; shorten the prompt"
        f"{'' if wanted is None else ' or lower max_tokens'}.",
        code="context_length_exceeded",
    )


def busy(message: str) -> ApiError:
    """More requests than the server takes at a time."""
    return ApiError(
        429,
        message,
        "rate_limit_exceeded",
        "rate_limit_exceeded",
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


def stopping() -> ApiError:
    """A request that is not finished when the server's time to end is over."""
    return ApiError(
        503, "The server is shutting down and did not finish this request; send it to another one, or later.",
        "service_unavailable_error", headers={"Retry-After": "5"},
    )  # fmt: skip


def no_such_model(name: str, known: list[str]) -> ApiError:
    """A model that is not served."""
    return ApiError(
        404, f"The model {name!r} is not served here; known: {', '.join(known)}.", code="model_not_found", param="model"
    )


def sentence(problem: Exception) -> str:
    """A message as a sentence of its own; it may begin with a field's name."""
    text = str(problem)
    return text if text.endswith(".") else f"{text}."
