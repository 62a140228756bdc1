"""The engine's options on the command line, from the fields of its configuration and their descriptions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from ....runtime import EngineConfig

_LEFT_OUT = ("fusions", "quiet")  # not for a command line
_FIELD = re.compile(r"^        (\w+): (.*(?:\n            .*)*)", re.MULTILINE)


def with_engine_options(*without: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Replace a command's parameter ``engine``, an :class:`EngineConfig`, by an option for each of the engine's fields.

    Args:
        without: fields that the command sets by itself.
    """
    parameters = [each for each in _parameters() if each.name not in without]

    def decorate(command: Callable[..., int | None]) -> Callable[..., int | None]:
        signature = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        # typer does not evaluate the annotations of a signature that is set.
        own = [
            each.replace(annotation=hints[each.name]) for each in signature.parameters.values() if each.name != "engine"
        ]

        @functools.wraps(command)
        def wrapped(**given: Any) -> int | None:
            chosen = {each.name: given.pop(each.name) for each in parameters}
            return command(**given, engine=EngineConfig(**chosen))

        wrapped.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {
            **{name: hint for name, hint in hints.items() if name != "engine"},
            **{each.name: each.annotation for each in parameters},
        }
        return wrapped

    return decorate


def options_given(engine: EngineConfig) -> list[str]:
    """The options whose values are not the defaults."""
    usual = EngineConfig()
    return [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        for name, value in ((field.name, getattr(engine, field.name)) for field in fields(EngineConfig))
        if value != getattr(usual, name)
    ]


def _parameters() -> list[inspect.Parameter]:
    hints = get_type_hints(EngineConfig)
    found: dict[str, str] = dict(_FIELD.findall(EngineConfig.__doc__ or ""))
    parameters = []
    for field in fields(EngineConfig):
        if field.name in _LEFT_OUT:
            continue
        # Literals are checked by the configuration, whose message names the choices.
        kind = hints[field.name] if hints[field.name] in (int, float, bool, int | None, str | None) else str
        text = " ".join(found[field.name].replace("``", "").split())
        help_ = f"{text[:1].upper()}{text[1:]}"
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[kind, typer.Option(help=help_, rich_help_panel="Engine")],
            )
        )
    return parameters
