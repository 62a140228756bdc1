"""Sweep files: recipes with a ``sweep`` section that says which fields vary."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ...system.errors import SmeltError, nearest_name
from ...system.settings.checked import checked
from ...system.settings.recipe_model import RecipeModel
from ...system.storage.digests import digest
from ...system.storage.paths import named_path
from ..recipe.file import read_document, set_value, validated
from ..recipe.recipe import Recipe
from ..recipe.yaml_document import Document

_MOST_TRIALS = 1_000
_LONGEST_NAME = 100  # of a trial's directory; longer ones are cut
_SHARED = ("model", "revision", "trust_remote_code", "output", "evaluate", "extends", "sweep")


class Resources(RecipeModel):
    """Resources of each trial on a Ray cluster."""

    cpus: float = Field(default=1, gt=0, description="Cores.")
    gpus: float = Field(default=0, ge=0, description="GPUs.")
    memory_bytes: int | None = Field(default=None, ge=1, description="Memory to reserve, in bytes; default: none.")


class SweepSettings(RecipeModel):
    """Which fields vary between trials."""

    grid: dict[str, list[Any]] = Field(
        default={}, description="A list of values per field (`steps.0.quantize.scheme`); every combination is a trial."
    )
    trials: list[dict[str, Any]] = Field(
        default=[], description="Additional trials, each a mapping of fields to values."
    )
    exclude: list[dict[str, Any]] = Field(default=[], description="Combinations of the grid to leave out.")
    resources: Resources = Field(default_factory=Resources, description="Resources of each trial on a Ray cluster.")

    @model_validator(mode="after")
    def _has_trials(self) -> SweepSettings:
        if not self.grid and not self.trials:
            raise ValueError("nothing varies; give grid or trials")
        fixed = next((key for each in (self.grid, *self.trials) for key in each if key.split(".")[0] in _SHARED), None)
        if fixed:
            raise ValueError(
                f"{fixed} cannot vary: all trials share one model and one evaluation; use a separate sweep"
            )
        empty = next((key for key, values in self.grid.items() if not values), None)
        if empty:
            raise ValueError(f"grid.{empty} is empty; give at least one value")
        for each in self.exclude:
            strange = next((key for key in each if key not in self.grid), None)
            if strange is not None:
                raise ValueError(
                    f"exclude names {strange}, which is not in grid{nearest_name(strange, list(self.grid))}"
                )
            if not each:
                raise ValueError("exclude has an entry without fields, which would leave out everything; remove it")
            unknown = next((key for key, value in each.items() if value not in self.grid[key]), None)
            if unknown is not None:
                raise ValueError(
                    f"exclude names {unknown}: {each[unknown]}, which is not among its values in grid, so it would leave out nothing"
                )
        return self


@dataclass(frozen=True)
class Trial:
    """One recipe of a sweep.

    Attributes:
        name: made from the values that vary.
        recipe: with its own output directory and without evaluation, which the sweep does for all trials.
    """

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Sweep:
    """A validated sweep.

    Attributes:
        base: what all trials share.
        settings: what varies.
        trials: at least one.
    """

    base: Recipe
    settings: SweepSettings
    trials: list[Trial]

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Sweep:
        """Read a sweep file.

        Args:
            path: a recipe with a ``sweep`` section.
            overrides: ``key=value`` settings for all trials.

        Raises:
            SmeltError: with one line per mistake.
        """
        file = named_path(path)
        document = read_document(file, overrides or [])
        section = document.data.pop("sweep", None)
        unvaried = Document(copy.deepcopy(document.data), document.origin)
        if not isinstance(section, dict):
            raise SmeltError(f"{file}: has no sweep section, so nothing varies; run it with `smelt run`")
        settings = checked(
            SweepSettings, section, lambda place, what: f"{file}: {'.'.join(filter(None, ('sweep', place)))}: {what}"
        )
        count = math.prod(len(values) for values in settings.grid.values()) + len(settings.trials)
        if count > _MOST_TRIALS:
            raise SmeltError(
                f"{file}: the sweep has {count} trials, but the limit is {_MOST_TRIALS}; vary fewer fields or values"
            )
        base = validated(Recipe, document, file)
        varied = (
            [
                chosen
                for values in itertools.product(*settings.grid.values())
                if not _is_excluded(chosen := dict(zip(settings.grid, values, strict=True)), settings.exclude)
            ]
            if settings.grid
            else []
        )
        trials: dict[str, Trial] = {}
        problems = []
        all_changes = [*varied, *settings.trials]
        if not all_changes:
            raise SmeltError(f"{file}: exclude leaves no trial; take something from it")
        twice = next((each for i, each in enumerate(all_changes) if each in all_changes[:i]), None)
        if twice is not None:
            raise SmeltError(f"{file}: two trials are identical: {_name(twice)}; keep one")
        names = [_name(changes) for changes in all_changes]
        for changes, short in zip(all_changes, names, strict=True):
            unique = names.count(short) == 1 and len(short) <= _LONGEST_NAME
            name = short if unique else f"{short[:_LONGEST_NAME]}-{digest(changes)[:6]}"
            fixed = {"output": str(Path(base.output) / "trials" / name), "evaluate": False}
            try:
                again = Document(copy.deepcopy(unvaried.data), dict(unvaried.origin))
                for key, value in {**changes, **fixed}.items():
                    set_value(again, key, copy.deepcopy(value), f"{file}: sweep sets {key}")
                trials[name] = Trial(name, _placed(validated(Recipe, again, file)))
            except SmeltError as error:
                problems += [f"trial {name}: {line}" for line in str(error).split("\n")]
        if problems:
            raise SmeltError("\n".join(problems))
        return cls(base, settings, list(trials.values()))


def _placed(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, for processes with another working directory."""
    changes: dict[str, Any] = {"output": str(Path(recipe.output).expanduser().resolve())}
    if not recipe.model.startswith("builtin:") and Path(recipe.model).expanduser().is_dir():
        changes["model"] = str(Path(recipe.model).expanduser().resolve())
    if recipe.adapter is not None:
        changes["adapter"] = str(Path(recipe.adapter).expanduser().resolve())
    source = Path(recipe.calibrate.source).expanduser()
    if source.is_file():
        changes["calibrate"] = recipe.calibrate.model_copy(update={"source": str(source.resolve())})
    return recipe.model_copy(update=changes)


def _is_excluded(chosen: dict[str, Any], exclude: list[dict[str, Any]]) -> bool:
    return any(all(chosen.get(key) == value for key, value in each.items()) for each in exclude)


def _name(changes: dict[str, Any]) -> str:
    """The trial's name: its values, with the last part of the field's name where a value alone is unclear."""
    parts = [_value(key.rpartition(".")[2], value) for key, value in changes.items()]
    return re.sub(r"[^\w.+-]+", "-", "-".join(parts)).strip("-.") or "base"


def _value(field: str, value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(_value("" if key in ("method", "scheme") else key, inner) for key, inner in value.items())
    if isinstance(value, (list, str)) and not value:
        return f"{field.replace('_', '')}none"
    if isinstance(value, list):
        return "-".join(_value("", inner) for inner in value)
    text = "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if isinstance(value, str) else f"{field.replace('_', '')}{text}"
