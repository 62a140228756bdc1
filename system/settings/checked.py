"""Plain data as a model of pydantic's, or sentences about what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import SmeltError

Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], data: Any, sentence: Callable[[str, str], str], most: int | None = None) -> Model:
    """What plain data holds.

    Args:
        model: that it should be.
        data: the data.
        sentence: from the place of a mistake, such as ``speed.prompt``, and what is wrong, to what is said.
        most: how many mistakes are named; all by default.

    Raises:
        SmeltError: one line per mistake.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        said = [(".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in error.errors()]
        raise SmeltError("\n".join(sentence(place, what) for place, what in said[:most])) from None
