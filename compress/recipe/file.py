"""Reading recipe files: YAML with line numbers, ``extends``, overrides, and all mistakes at once."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ...system.errors import SmeltError, nearest_name
from ...system.settings.variants import Variants
from ...system.storage.paths import irregular, named_path
from .yaml_document import DEEPEST, LARGEST_FILE, Document, Place, parse

Settings = TypeVar("Settings", bound=BaseModel)
Found = TypeVar("Found")

_LONGEST_CHAIN = 20
_MOST_MISTAKES = 20


def load(schema: type[Settings], path: Path, overrides: list[str]) -> Settings:
    """Read, merge, override and validate a recipe; see :meth:`smelt.compress.Recipe.load`."""
    document = read_document(path, overrides)
    if "sweep" in document.data:
        raise SmeltError(
            f"{_origin(document, ('sweep',), path)}: this recipe has a sweep section; run it with `smelt sweep {path}`"
        )
    return validated(schema, document, path)


def read_document(path: Path, overrides: list[str]) -> Document:
    """Read and merge a recipe file, and apply overrides."""
    document = _read(path, [])
    for override in overrides:
        _override(document, override)
    return document


def validated(schema: type[Settings], document: Document, path: Path) -> Settings:
    """The recipe that a document holds.

    Args:
        schema: the class of recipes.
        document: plain data, with the line of every value.
        path: the file, for messages.

    Raises:
        SmeltError: with one line per mistake.
    """
    try:
        return schema.model_validate(document.data)
    except ValidationError as error:
        # `evaluate` is a section or false; the mistakes of the section are more useful.
        mistakes = [item for item in error.errors() if "literal[False]" not in item["loc"]]
        lines = [_sentence(schema, item, document, path) for item in mistakes[:_MOST_MISTAKES]]
        more = [f"{path}: and {len(mistakes) - len(lines)} more mistakes"] if len(mistakes) > len(lines) else []
        raise SmeltError("\n".join(lines + more)) from None


def _read(path: Path, chain: list[Path]) -> Document:
    path = named_path(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError):  # circular symlinks, reported when the file is read
        resolved = path
    if resolved in chain:
        names = " -> ".join(p.name for p in [*chain, resolved])
        raise SmeltError(f"{path}: circular extends ({names}); remove one of the extends lines")
    if len(chain) == _LONGEST_CHAIN:
        raise SmeltError(f"{path}: more than {_LONGEST_CHAIN} recipes extend each other; merge some of the files")
    document = parse(_text(path, chain), str(path))
    if not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"holds a {type(document.data).__name__}, not key: value lines"
        raise SmeltError(f"{path}: the recipe {found}; start from recipes/quickstart.yaml")
    base_name = document.data.pop("extends", None)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        here = _origin(document, ("extends",), path)
        raise SmeltError(f"{here}: extends must be the path of one recipe, not {_shown(base_name)}")
    return _laid_over(_read(path.parent / named_path(base_name), [*chain, resolved]), document)


def _text(path: Path, chain: list[Path]) -> str:
    strange = irregular(path)
    if strange is not None:
        raise SmeltError(f"{path}: the recipe cannot be read (it is {strange}); give the path of a YAML file")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        base = f" (named by extends in {chain[-1]})" if chain else ""
        raise SmeltError(f"{path}: recipe file not found{base}; check the path") from None
    except OSError as error:
        raise SmeltError(
            f"{path}: the recipe cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    if len(raw) > LARGEST_FILE:
        raise SmeltError(f"{path}: is larger than {LARGEST_FILE // 1024} KiB, the limit for a recipe; check the path")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SmeltError(f"{path}: the recipe is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _laid_over(base: Document, over: Document) -> Document:
    """Merge ``over`` into ``base``: mappings are merged, everything else is replaced."""
    replaced: set[Place] = set()
    data = _merged(base.data, over.data, (), replaced)

    def is_replaced(place: Place) -> bool:
        return any(place[:length] in replaced for length in range(len(place) + 1))

    kept = {place: line for place, line in base.origin.items() if not is_replaced(place)}
    return Document(data, kept | {place: line for place, line in over.origin.items() if is_replaced(place)})


def _merged(below: Any, above: Any, place: Place, replaced: set[Place]) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        replaced.add(place)
        return above
    for key, value in above.items():
        if key in below:
            below[key] = _merged(below[key], value, (*place, key), replaced)
        else:
            below[key] = value
            replaced.add((*place, key))
    return below


def set_value(document: Document, key: str, value: Any, said: str) -> None:
    """Set one field, such as ``steps.0.quantize.scheme``.

    Args:
        document: changed in place.
        key: the field's dotted path.
        value: plain data.
        said: where the setting comes from, for messages.

    Raises:
        SmeltError: the recipe has no such field.
    """
    place: Place = tuple(int(part) if part.isdecimal() and len(part) < 9 else part for part in key.split("."))
    if len(place) > DEEPEST:
        raise SmeltError(f"{said}: the key has more than {DEEPEST} levels; check it")
    if place == ("extends",):
        raise SmeltError(f"{said}: extends can only be set in a recipe file; run the other file, or set single fields")
    target = document.data
    for depth, part in enumerate(place[:-1]):
        if isinstance(target, dict) and isinstance(part, str):
            target = target.setdefault(part, {})
        elif isinstance(target, list) and isinstance(part, int) and part < len(target):
            target = target[part]
        else:
            raise SmeltError(f"{said}: the recipe has no {'.'.join(map(str, place[: depth + 1]))}")
    last = place[-1]
    if isinstance(target, dict if isinstance(last, str) else list) and (isinstance(last, str) or last < len(target)):
        target[last] = value  # type: ignore
    else:
        raise SmeltError(f"{said}: the recipe has no {key} to set")
    for known in [p for p in document.origin if p[: len(place)] == place]:
        del document.origin[known]
    document.origin[place] = said


def _override(document: Document, text: str) -> None:
    key, equals, raw = text.partition("=")
    line = " ".join(text.split())
    said = f"--set {line if len(line) <= 80 else line[:77] + '...'}"
    if not equals or not key:
        raise SmeltError(f"{said}: expected key=value, for example --set steps.0.quantize.scheme=W8A16")
    if len(raw) > LARGEST_FILE:
        raise SmeltError(f"{said}: the value is too long; write it in the recipe")
    set_value(document, key, parse(raw, said, lines=False).data, said)


def _sentence(schema: type[BaseModel], error: ErrorDetails, document: Document, path: Path) -> str:
    place, model = _place_in_data(schema, error["loc"], document.data)
    where = _origin(document, place, path)
    name = ".".join(str(part) for part in place)
    kind, found = error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = [*model.model_fields, *(["extends"] if model is schema else [])]
        hint = nearest_name(str(place[-1]), known)
        expected = f"; expected one of {', '.join(known)}" if known else ""
        return f"{where}: unknown key {name}{expected}{hint}"
    if kind == "missing":
        parent = ".".join(str(part) for part in place[:-1])
        return f"{where}: {f'{parent} lacks' if parent else 'the recipe lacks'} the required key {error['loc'][-1]}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "model_type":
        return f"{where}: {name} is {_shown(found)}; it must be a section of key: value lines"
    if kind == "value_error":
        return f"{where}: {name}: {message}" if name else f"{where}: {message}"
    hint = ""
    if kind == "literal_error" and isinstance(found, str):
        # The values are only in pydantic's message: sections with variants raise their errors again without context.
        hint = nearest_name(found, re.findall(r"'([^']*)'", message))
    return f"{where}: {name} is {_shown(found)}; {message[0].lower()}{message[1:]}{hint}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place_in_data(schema: type[BaseModel], loc: tuple[str | int, ...], data: Any) -> tuple[Place, type[BaseModel]]:
    """The part of pydantic's location that consists of keys of the file, and the model of the last key.

    Pydantic's location also contains the chosen variant of a section, and members of other unions.
    """
    place: list[str | int] = []
    model, within = schema, list[Any]([schema])  # what `data` may be, by annotations
    for i, key in enumerate(loc):
        variants = _found_in(within, Variants)
        if variants is not None and key in variants.models:
            model, within = variants.models[str(key)], [variants.models[str(key)]]
            continue
        present = (isinstance(data, dict) and key in data) or (
            isinstance(data, list) and isinstance(key, int) and key < len(data)
        )
        if isinstance(key, str):
            model = _model_in(within) or model
            field = model.model_fields.get(key)
            within = within if field is None else [field.annotation, *field.metadata]
        if present:
            place.append(key)
            data = data[key]  # type: ignore
        elif i == len(loc) - 1 and isinstance(data, dict):
            place.append(key)
    return tuple(place), model


def _origin(document: Document, place: Place, path: Path) -> str:
    while place and place not in document.origin:
        place = place[:-1]
    return document.origin.get(place, str(path)) if place else str(path)


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and all its parts, recursively."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def _found_in(annotations: list[Any], kind: type[Found]) -> Found | None:
    return next((each for whole in annotations for each in _parts(whole) if isinstance(each, kind)), None)


def _model_in(annotations: list[Any]) -> type[BaseModel] | None:
    found = (each for whole in annotations for each in _parts(whole) if isinstance(each, type))
    return next((each for each in found if issubclass(each, BaseModel)), None)
