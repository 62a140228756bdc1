"""Limits on a layer's quantization error, and what to do with layers beyond them."""

from __future__ import annotations

from dataclasses import replace

from ...models.steps.record import LayerRecord
from ...system.errors import SmeltError
from ..scheme import resolve
from ..settings.guard import Guard
from .assignment import Treatment


class LayerGuard:
    """Judges layers by the relative error of their outputs.

    Args:
        settings: the recipe's section; None accepts everything.
        advice: what the user can do about a layer that fails.
    """

    def __init__(
        self,
        settings: Guard | None,
        advice: str = "give it more bits with an override, or set guard.otherwise: fallback",
    ) -> None:
        self._settings = settings
        self._advice = advice

    def fallback(self, treatment: Treatment) -> Treatment | None:
        """The treatment for a failing layer; None if the recipe sets no fallback."""
        if self._settings is None or self._settings.otherwise != "fallback":
            return None
        return replace(treatment, scheme=resolve(self._settings.fallback))

    def failing(self, records: list[LayerRecord]) -> list[LayerRecord]:
        """The layers whose error exceeds the limit.

        Raises:
            SmeltError: there are any, and the recipe sets the run to stop.
        """
        if self._settings is None:
            return []
        limit = self._settings.max_layer_error
        found = [record for record in records if record.error is not None and record.error > limit]
        if found and self._settings.otherwise == "fail":
            worst = max(found, key=lambda record: record.error or 0.0)
            raise SmeltError(
                f"{worst.name}: its outputs change by {worst.error:.3g}, more than guard.max_layer_error {limit:g}, at"
                f" {worst.scheme}; {self._advice}"
            )
        return found

    def judge(self, record: LayerRecord) -> None:
        """If the layer's error exceeds the limit, note it in the record or end the run, as the recipe sets."""
        if self.failing([record]):
            record.notes.append(self.sentence(record))

    def sentence(self, record: LayerRecord) -> str:
        """A sentence for the report about a failing layer that is kept."""
        assert self._settings is not None
        return f"its outputs change by {record.error:.3g}, more than max_layer_error {self._settings.max_layer_error:g}"
