"""Templates of HTML and SVG filled with a report's numbers. Names and texts of models are not trusted."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

# XML has no way to write these, and the plot is XML.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render(template: str, **data: Any) -> str:
    """A template's text; what ``data`` holds is escaped."""
    return _environment().get_template(template).render(data)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # needed only to write a page

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_writable,
    )
    environment.filters["fixed"] = _fixed
    return environment


def _writable(value: object) -> object:
    """A value without unwritable characters, before escaping; a macro's output has been through this already."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _UNWRITABLE.sub("\ufffd", value)


def _fixed(value: float, decimals: int = 1) -> str:
    return f"{value:.{decimals}f}"
