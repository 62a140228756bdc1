"""The models of a server, by name."""

from __future__ import annotations

from collections.abc import Iterator

from ..http.errors import no_such_model
from .served_model import ServedModel


class ServedModels:
    """Models by the names that requests call them; the first is the default.

    Args:
        models: at least one.
    """

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """A model; the default one if no name is given.

        Raises:
            ApiError: there is none of that name.
        """
        if not name:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise no_such_model(name, list(self._models))
        return self._models[name]
