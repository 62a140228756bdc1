"""The models of a server, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..http.errors import ApiError, no_such_model
from .served_model import ServedModel


class ServedModels:
    """Models by the names that requests call them; the first is the default, also while it is not loaded.

    Args:
        models: that are served from the start.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._default = next(iter(self._models), None)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def get(self, name: str | None) -> ServedModel:
        """A model; the default one if no name is given.

        Raises:
            ApiError: there is none of that name, or the default one is not loaded.
        """
        found = self._models.get(name or self._default or "")
        if found is None and not name:
            known = ", ".join(self._models) or "none"
            raise ApiError(
                503, f"The default model, {self._default}, is not loaded; name another one (known: {known}), or ask later.",
                "service_unavailable_error", param="model",
            )  # fmt: skip
        if found is None:
            raise no_such_model(name or "", list(self._models))
        return found

    def add(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        self._models[model.name] = model
        self._default = self._default or model.name

    def remove(self, name: str) -> None:
        """Serve a model no more; the requests that it works on keep it."""
        del self._models[name]

    def variants(self, model: ServedModel) -> list[ServedModel]:
        """The adapters on a model."""
        return [other for other in self if other.base is model]
