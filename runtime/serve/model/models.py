"""The models of a server, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..http.errors import no_such_model
from .served_model import ServedModel


class ServedModels:
    """Models by the names that requests call them; the first is the default.

    Args:
        models: that are served from the start.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def get(self, name: str | None) -> ServedModel:
        """A model; the default one if no name is given.

        Raises:
            ApiError: there is none of that name, or none at all.
        """
        found = self._models.get(name) if name else next(iter(self._models.values()), None)
        if found is None:
            raise no_such_model(name or "", list(self._models))
        return found

    def add(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        """Serve a model no more; the requests that it works on keep it."""
        del self._models[name]

    def variants(self, model: ServedModel) -> list[ServedModel]:
        """The adapters on a model."""
        return [other for other in self if other.base is model]
