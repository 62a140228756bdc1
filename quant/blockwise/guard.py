"""Limits on what a layer may lose, and what is done about a layer beyond them."""

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
        settings: the recipe's section; None lets everything pass.
        advice: what a person can do about a layer that fails.
    """

    def __init__(
        self,
        settings: Guard | None,
        advice: str = "give it more bits by an override, or let guard.otherwise be fallback",
    ) -> None:
        self._settings = settings
        self._advice = advice

    def fallback(self, treatment: Treatment) -> Treatment | None:
        """What a layer that fails is given instead; None if the recipe wants no fallback."""
        if self._settings is None or self._settings.otherwise != "fallback":
            return None
        return replace(treatment, scheme=resolve(self._settings.fallback))

    def failing(self, records: list[LayerRecord]) -> list[LayerRecord]:
        """The layers that lose more than they may.

        Raises:
            SmeltError: there are any, and the recipe says that the run ends then.
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
        """Note it in the record if the layer loses more than it may, or end the run, as the recipe wants."""
        if self.failing([record]):
            record.notes.append(self.sentence(record))

    def sentence(self, record: LayerRecord) -> str:
        """A sentence for the report about a layer that fails and stays as it is."""
        assert self._settings is not None
        return f"its outputs change by {record.error:.3g}, more than max_layer_error {self._settings.max_layer_error:g}"
