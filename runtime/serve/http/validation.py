"""A body that is not what an API takes, in one sentence."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError

from .errors import ApiError

_LONGEST = 200


def _is_field(part: str) -> bool:
    return part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "list", "dict", "bool")


def validation_problem(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong. What the client sent is not repeated at length."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    # Parts that are not names of fields say which member of a union was tried.
    path = [str(part) for part in first["loc"] if part != "body" and (isinstance(part, int) or _is_field(part))]
    where = ".".join(path)[:_LONGEST]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field {where!r}; leave it out.", code="unknown_parameter", param=where)
    if first["type"] == "missing":
        if not where:
            return ApiError(400, "There is no body, or it is not sent as application/json.")
        return ApiError(400, f"Missing required field {where!r}.", code="missing_required_parameter", param=where)
    return ApiError(
        400, f"{where or 'The body'}: {first['msg'][:_LONGEST]}.", code="invalid_value", param=where or None
    )
