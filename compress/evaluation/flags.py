"""Command-line flags to evaluation settings."""

from __future__ import annotations

from typing import Any, Literal

from ...system.errors import SmeltError, nearest_name
from ...system.settings.checked import checked
from .settings import Evaluate, SpeedSettings


def evaluation_settings(*, tasks: str | None, speed: str, **fields: Any) -> Evaluate:
    """Settings as :class:`Evaluate` checks them.

    Args:
        tasks: names and paths, comma-separated.
        speed: as :func:`speed_settings` reads it.
        fields: of :class:`Evaluate`.

    Raises:
        SmeltError: one line per mistake.
    """
    named = [] if tasks is None else [name.strip() for name in tasks.split(",")]
    if not all(named):
        raise SmeltError(
            f"--tasks {tasks!r}: has an empty name before or after a comma; give names, such as piqa,lambada_openai"
        )
    given = {"tasks": named, "speed": speed_settings(speed), **fields}
    return checked(Evaluate, given, lambda place, what: f"--{place}: {what}")


def speed_settings(text: str) -> SpeedSettings | Literal[False]:
    """``prompt=512,generate=128,concurrency=1,8,32``; ``none`` for no measurement."""
    if text.strip().lower() in ("none", "false", ""):
        return False
    given: dict[str, list[str]] = {}
    key = ""
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            key = name.strip()
            if key in given:
                raise SmeltError(f"--speed {text}: {key} is given twice")
            given[key] = [value.strip()]
        elif key:
            given[key].append(part.strip())
        else:
            raise SmeltError(f"--speed {text}: expected key=value, for example prompt=512,generate=128,concurrency=1,8")
    fields: dict[str, Any] = {}
    for key, values in given.items():
        if key not in SpeedSettings.model_fields:
            known = list(SpeedSettings.model_fields)
            raise SmeltError(
                f"--speed {text}: unknown key {key!r}; expected {', '.join(known)}{nearest_name(key, known)}"
            )
        if not all(value.isdecimal() and len(value) < 10 for value in values) or (
            len(values) > 1 and key != "concurrency"
        ):
            raise SmeltError(
                f"--speed {text}: {key} must be {'whole numbers' if key == 'concurrency' else 'a whole number'}"
            )
        fields[key] = [int(value) for value in values] if key == "concurrency" else int(values[0])
    return checked(SpeedSettings, fields, lambda place, what: f"--speed {place}: {what}")
