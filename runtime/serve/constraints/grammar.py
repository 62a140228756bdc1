"""Grammars in llguidance's language, and what a request's fields mean in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..answer.schema import CallFormat
from ..http.errors import ApiError

# Models that may write any white space between JSON's parts write nothing else.
SPACES = {"whitespace_pattern": r"[ \n]{1,16}"}
_MOST_CHARACTERS = 256 << 10


@dataclass(frozen=True)
class Grammar:
    """What an output must look like.

    Attributes:
        kind: ``json``, ``regex``, ``choice``, ``lark``, ``calls`` or ``tags``.
        text: a schema or a list as JSON, an expression, or a grammar; for ``calls`` and ``tags`` a grammar with texts in it that may be tokens.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > _MOST_CHARACTERS:
            raise ApiError(400, f"The schema or grammar has more than {_MOST_CHARACTERS} characters.")
        if "\0" in self.text:
            raise ApiError(400, "The schema or grammar contains a NUL character.")


def json_text(schema: Any) -> Grammar:
    """JSON that a schema allows.

    Raises:
        ApiError: it is no schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ApiError(400, f"The JSON schema is not JSON ({error}).") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ApiError(400, "The JSON schema is not an object.")
    # Not sorted: properties come in the schema's order.
    return Grammar("json", json.dumps(schema))


def expression(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    return Grammar("regex", pattern)


def choices(texts: list[str]) -> Grammar:
    """One of some texts.

    Raises:
        ApiError: there are none.
    """
    if not texts or not all(texts):
        raise ApiError(400, "choice needs texts that are not empty.")
    return Grammar("choice", json.dumps(texts))


def lark(text: str) -> Grammar:
    """A grammar in Lark's or llama.cpp's notation."""
    return Grammar("lark", text)


def tool_calls(form: CallFormat, tools: Mapping[str, dict[str, Any] | None], *, several: bool) -> Grammar:
    """Calls of tools, in a model's own format.

    Args:
        form: the format.
        tools: the schema of each tool's arguments, by its name.
        several: whether there may be more than one call.
    """
    calls = [_call(form, name, schema) for name, schema in tools.items()]
    rules = [f"call{i}: {rule}" for i, rule in enumerate(calls)]
    one = " | ".join(f"call{i}" for i in range(len(calls)))
    more = f" ({_quoted(form.separator)} call)*" if several and form.separator else " call*" if several else ""
    start = " ".join(part for part in (_quoted(form.first), "call" + more, _quoted(form.last)) if part)
    return Grammar("calls", "\n".join([f"start: {start}", f"call: {one}", *rules]))


def calls_or_json(
    form: CallFormat, tools: Mapping[str, dict[str, Any] | None], schema: dict[str, Any], *, several: bool
) -> Grammar:
    """Calls of tools, or an answer in JSON.

    Args:
        form: of the calls.
        tools: the schema of each tool's arguments, by its name.
        schema: of the answer.
        several: whether there may be more than one call; there is only one where calls are plain JSON.
    """
    written = [_as_json(form, name, arguments) for name, arguments in tools.items()]
    if not form.first and all(each is not None for each in written):
        # Both begin alike, which a schema can tell apart and a grammar's words cannot.
        either = [_moved(each, f"#/anyOf/{i}") for i, each in enumerate([schema, *written])]
        return Grammar("json", json.dumps({"anyOf": either}))
    calls = tool_calls(form, tools, several=several).text.replace("start:", "calls:", 1)
    answer = json.dumps({**schema, "x-guidance": SPACES})
    return Grammar("calls", f"start: calls | answer\nanswer: %json {answer}\n{calls}")


def optional_calls(
    form: CallFormat,
    tools: Mapping[str, dict[str, Any] | None],
    *,
    several: bool,
    thinking: tuple[str, str] | None = None,
) -> Grammar:
    """Any text, and calls of tools in it: what begins as a call ends as one.

    Args:
        form: the format.
        tools: the schema of each tool's arguments, by its name.
        several: whether there may be more than one call.
        thinking: the tags of reasoning that may come before.
    """
    cut = len(form.trigger)
    inner = form if form.first else replace(form, begin=form.begin[cut:])
    rules = [f"call{i}: {_call(inner, name, schema)}" for i, (name, schema) in enumerate(tools.items())]
    one = " | ".join(f"call{i}" for i in range(len(tools)))
    more = f" ({_quoted(form.separator)} call)*" if several and form.first else ""
    body = " ".join(part for part in (_quoted(form.first[cut:]), "call" + more, _quoted(form.last)) if part)
    count = "*" if several and not form.first else "?"
    lines = [
        f"start: {'' if thinking is None else 'thought? '}(begun {body}){count} TEXT",
        *([] if thinking is None else [f"thought: {_quoted(thinking[0])} TEXT {_quoted(thinking[1])}"]),
        f"begun[lazy]: TEXT {_quoted(form.trigger)}",
        f"call: {one}",
        r"TEXT: /(.|\n)*/",
    ]
    return Grammar("calls", "\n".join([*lines, *rules]))


def structural_tags(tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> Grammar:
    """Any text, and tags in it: after a trigger comes the rest of a tag that begins with it, its JSON, and its end.

    Args:
        tags: how each begins, the schema of what is in it, and how it ends.
        triggers: what the tags begin with.

    Raises:
        ApiError: a tag does not begin with one trigger, or a schema is none.
    """
    if not tags or not all(triggers):
        raise ApiError(400, "A structural tag needs structures, and triggers that are not empty.")
    rules: list[str] = []
    of_trigger: dict[str, list[str]] = {}
    for begin, schema, end in tags:
        found = [trigger for trigger in dict.fromkeys(triggers) if begin.startswith(trigger)]
        if len(found) != 1:
            raise ApiError(
                400,
                f"A tag that begins with {begin[:80]!r} begins with {len(found)} of the triggers; it must with one.",
            )
        of_trigger.setdefault(found[0], []).append(f"tag{len(rules)}")
        inner = {**json.loads(json_text(schema).text), "x-guidance": SPACES}
        parts = (_quoted(begin[len(found[0]) :]), f"%json {json.dumps(inner)}", _quoted(end))
        rules.append(f"tag{len(rules)}: {' '.join(part for part in parts if part)}")
    groups = [f"begun{i} ({' | '.join(names)})" for i, names in enumerate(of_trigger.values())]
    begun = [f"begun{i}[lazy]: TEXT {_quoted(trigger)}" for i, trigger in enumerate(of_trigger)]
    lines = [f"start: ({' | '.join(groups)})* TEXT", *begun, r"TEXT: /(.|\n)*/", *rules]
    return Grammar("tags", "\n".join(lines))


def _as_json(form: CallFormat, name: str, schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a call, if calls are JSON as they are written."""
    try:
        call = json.loads(f"{form.before(name)}null{form.end}")
    except json.JSONDecodeError:
        return None
    parts = {
        key: _moved(_arguments(schema), f"#/properties/{key}") if value is None else {"const": value}
        for key, value in call.items()
    }
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def _call(form: CallFormat, name: str, schema: dict[str, Any] | None) -> str:
    arguments = {**_arguments(schema), "x-guidance": SPACES}
    return " ".join(
        part for part in (_quoted(form.before(name)), f"%json {json.dumps(arguments)}", _quoted(form.end)) if part
    )


def _moved(schema: Any, to: str) -> Any:
    """A schema that is a part of another, with what refers to its own parts."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, to)
        for key, value in schema.items()
    }


def _arguments(schema: dict[str, Any] | None) -> dict[str, Any]:
    return schema or {"type": "object", "properties": {}, "additionalProperties": False}


def _quoted(text: str) -> str:
    # Without the mark of a schema: who looks for one finds ours.
    return json.dumps(text).replace("%", r"\u0025") if text else ""
