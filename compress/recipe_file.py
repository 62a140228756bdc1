"""Reading recipe files: YAML with line numbers, ``extends``, overrides, and mistakes told in full."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..system.errors import SmeltError, nearest_name
from .recipe import Recipe

Place = tuple[str | int, ...]
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class Document:
    """Plain data and, for every place in it, where it was written."""

    data: Any
    origin: dict[Place, str]


def load(path: Path, overrides: list[str]) -> Recipe:
    """Read, merge, override and validate a recipe; see :meth:`smelt.compress.Recipe.load`."""
    document = read_document(path, overrides)
    if "sweep" in document.data:
        raise SmeltError(
            f"{document.origin[('sweep',)]}: this recipe has a sweep section; run it with `smelt sweep {path}`"
        )
    return validated(document, path)


def read_document(path: Path, overrides: list[str]) -> Document:
    """Read and merge a recipe file, and apply overrides."""
    document = _read(path, [])
    for override in overrides:
        _override(document, override)
    return document


def validated(document: Document, path: Path) -> Recipe:
    """The recipe that a document holds.

    Raises:
        SmeltError: with one line a mistake.
    """
    try:
        return Recipe.model_validate(document.data)
    except ValidationError as error:
        # `evaluate` is a section or false; what it should have been as a section says more.
        told = [item for item in error.errors() if "literal[False]" not in item["loc"]]
        raise SmeltError("\n".join(_sentence(item, document, path) for item in told)) from None


def _read(path: Path, chain: list[Path]) -> Document:
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in [*chain, resolved])
        raise SmeltError(f"{path}: extends goes round in a circle ({names}); remove one of the extends lines")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        base = f" (named by extends in {chain[-1]})" if chain else ""
        raise SmeltError(f"{path}: there is no such recipe file{base}; check the path") from None
    except UnicodeDecodeError as error:
        raise SmeltError(f"{path}: the recipe is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SmeltError(
            f"{path}: the recipe cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    document = _parse(text, path)
    if not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"holds a {type(document.data).__name__}, not key: value lines"
        raise SmeltError(f"{path}: the recipe {found}; start from recipes/quickstart.yaml")
    base_name = document.data.pop("extends", None)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        raise SmeltError(f"{document.origin[('extends',)]}: extends must be the path of one recipe, not {base_name!r}")
    base = _read(path.parent / base_name, [*chain, resolved])
    return Document(_merge(base, document, ()), base.origin)


def _parse(text: str, path: Path) -> Document:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Document(None, {})
        origin: dict[Place, str] = {}
        return Document(_build(root, (), origin, path), origin)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "it cannot be parsed"
        raise SmeltError(f"{path}{line}: this is not valid YAML: {what}") from None


def _build(node: yaml.Node, place: Place, origin: dict[Place, str], path: Path, within: tuple[int, ...] = ()) -> Any:
    here = f"{path}:{node.start_mark.line + 1}"
    origin.setdefault(place, here)
    if id(node) in within:
        raise SmeltError(f"{here}: an alias refers to what it is part of; write it out")
    within = (*within, id(node))
    if isinstance(node, yaml.MappingNode):
        yaml.SafeLoader("").flatten_mapping(node)  # `<<: *anchor`
        built: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise SmeltError(f"{line}: a key must be a plain name")
            key = _scalar(key_node)
            if key in built:
                raise SmeltError(f"{line}: {key} is set twice in the same place; keep one")
            origin[(*place, key)] = line
            built[key] = _build(value_node, (*place, key), origin, path, within)
        return built
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*place, i), origin, path, within) for i, child in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    # YAML 1.1 reads 1e-3 as a word, for want of a point.
    if isinstance(node, yaml.ScalarNode) and node.style is None and _SCIENTIFIC.fullmatch(node.value):
        return float(node.value)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)  # type: ignore[no-untyped-call]
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def _merge(base: Document, over: Document, place: Place) -> Any:
    """Lay ``over`` on ``base`` at ``place``: mappings are merged, everything else is replaced."""
    below, above = _at(base.data, place), _at(over.data, place)
    if isinstance(below, dict) and isinstance(above, dict):
        for key in above:
            if key in below:
                below[key] = _merge(base, over, (*place, key))
            else:
                below[key] = above[key]
                _move_origins(base, over, (*place, key))
        return below
    _move_origins(base, over, place)
    return above


def _move_origins(base: Document, over: Document, place: Place) -> None:
    for known in [p for p in base.origin if p[: len(place)] == place]:
        del base.origin[known]
    base.origin.update({p: o for p, o in over.origin.items() if p[: len(place)] == place})


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


def _override(document: Document, text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise SmeltError(f"--set {text}: expected key=value, for example --set steps.0.quantize.scheme=W8A16")
    try:
        value = float(raw) if _SCIENTIFIC.fullmatch(raw) else yaml.safe_load(raw)
    except yaml.YAMLError:
        raise SmeltError(f"--set {text}: the value is not valid YAML") from None
    place: Place = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    target = document.data
    for depth, part in enumerate(place[:-1]):
        if isinstance(target, dict) and isinstance(part, str):
            target = target.setdefault(part, {})
        elif isinstance(target, list) and isinstance(part, int) and part < len(target):
            target = target[part]
        else:
            raise SmeltError(f"--set {text}: the recipe has no {'.'.join(map(str, place[: depth + 1]))}")
    last = place[-1]
    if isinstance(target, dict) or (isinstance(target, list) and isinstance(last, int) and last < len(target)):
        target[last] = value  # type: ignore
    else:
        raise SmeltError(f"--set {text}: the recipe has no {key} to set")
    for known in [p for p in document.origin if p[: len(place)] == place]:
        del document.origin[known]
    document.origin[place] = f"--set {text}"


def _sentence(error: ErrorDetails, document: Document, path: Path) -> str:
    place = _place_in_data(error["loc"], document.data)
    where = _origin(document, place, path)
    name = ".".join(str(part) for part in place)
    kind, found = error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = _field_names(error["loc"][:-1])
        hint = nearest_name(str(place[-1]), known)
        expected = f"; expected one of {', '.join(known)}" if known else ""
        return f"{where}: unknown key {name}{expected}{hint}"
    if kind == "missing":
        parent = ".".join(str(part) for part in place[:-1])
        return f"{where}: {f'{parent} lacks' if parent else 'the recipe lacks'} the required key {error['loc'][-1]}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {name}: {message}" if name else f"{where}: {message}"
    return f"{where}: {name} is {_shown(found)}; {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place_in_data(loc: tuple[str | int, ...], data: Any) -> Place:
    """The part of pydantic's location that names keys of the file (it also names union members)."""
    place: list[str | int] = []
    for i, key in enumerate(loc):
        present = (isinstance(data, dict) and key in data) or (
            isinstance(data, list) and isinstance(key, int) and key < len(data)
        )
        if present:
            place.append(key)
            data = data[key]  # type: ignore
        elif i == len(loc) - 1 and isinstance(data, dict):
            place.append(key)
    return tuple(place)


def _origin(document: Document, place: Place, path: Path) -> str:
    while place and place not in document.origin:
        place = place[:-1]
    return document.origin.get(place, str(path)) if place else str(path)


def _field_names(loc: tuple[str | int, ...]) -> list[str]:
    model: Any = Recipe
    for key in loc:
        if isinstance(key, int):
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or key not in model.model_fields:
            continue
        model = _model_in(model.model_fields[key].annotation) or model
    names = list(model.model_fields)
    return [*names, "extends"] if model is Recipe else names


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if found:
            return found
    return None
