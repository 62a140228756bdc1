"""A body that is not what an API takes, in one sentence."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError

from ....system.errors import nearest_name
from .errors import ApiError

_LONGEST = 200
# What other servers, or earlier versions of them, call it.
_RENAMED = dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "use structured_outputs"
) | {"extra_body": "put its fields beside the others, as clients do before they send it"}
# A body that is no JSON object to begin with.
_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")


def _is_field(part: str) -> bool:
    return part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "list", "dict", "bool")


def validation_problem(error: RequestValidationError, fields: list[str]) -> ApiError:
    """The first thing that is wrong. What the client sent is not repeated at length.

    Args:
        error: what was found.
        fields: that the body may have.
    """
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    # Parts that are not names of fields say which member of a union was tried.
    path = [str(part) for part in first["loc"] if part != "body" and (isinstance(part, int) or _is_field(part))]
    where = ".".join(path)[:_LONGEST]
    if first["type"] == "extra_forbidden":
        near = _RENAMED.get(where) or nearest_name(where, fields).removeprefix("; ") if len(path) == 1 else ""
        advice = near or "leave it out."
        what = f"Unknown field {where!r}; {advice}{'' if advice[-1] in '.?' else '.'}"
        return ApiError(400, what, code="unknown_parameter", param=where)
    if not where and first["type"] in _NO_OBJECT:
        return ApiError(400, "There is no body that is a JSON object, or it is not sent as application/json.")
    if first["type"] == "missing":
        return ApiError(400, f"Missing required field {where!r}.", code="missing_required_parameter", param=where)
    return ApiError(
        400, f"{where or 'The body'}: {first['msg'][:_LONGEST]}.", code="invalid_value", param=where or None
    )
