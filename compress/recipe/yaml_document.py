"""Reading YAML as plain data, with the line of every value and with size limits, since aliases can expand to gigabytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from ...system.errors import SmeltError

Place = tuple[str | int, ...]

LARGEST_FILE = 1 << 18
# Counted with aliases expanded.
_MOST_VALUES = 20_000
DEEPEST = 50
_LARGEST_INTEGER = 2**63
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null"}


@dataclass
class Document:
    """Plain data and, for every place in it, the file and line it comes from."""

    data: Any
    origin: dict[Place, str]


def parse(text: str, source: str, *, lines: bool = True) -> Document:
    """Read YAML that holds strings, numbers, booleans, null, lists and mappings.

    Args:
        text: the YAML.
        source: its origin, for messages.
        lines: whether messages include line numbers.

    Raises:
        SmeltError: it is invalid, contains other types, or exceeds the limits.
    """
    try:
        loader = _YamlLoader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and lines else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
        raise SmeltError(f"{source}{line}: this is not valid YAML: {what}") from None
    if root is None:
        return Document(None, {})
    builder = _Builder(source, lines)
    return Document(builder.build(root, ()), builder.origin)


class _YamlLoader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        try:
            if self.depth > DEEPEST:
                raise yaml.MarkedYAMLError(
                    problem=f"it nests deeper than {DEEPEST} levels",
                    problem_mark=self.peek_event().start_mark,
                )
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Builder:
    def __init__(self, source: str, lines: bool) -> None:
        self.origin: dict[Place, str] = {}
        self._source, self._lines = source, lines
        self._built = 0
        self._within: list[yaml.Node] = []

    def build(self, node: yaml.Node, place: Place) -> Any:
        here = self._where(node)
        self.origin.setdefault(place, here)
        self._built += 1
        if self._built > _MOST_VALUES:
            raise SmeltError(f"{here}: more than {_MOST_VALUES} values with aliases expanded; shorten it")
        if any(node is outer for outer in self._within):
            raise SmeltError(f"{here}: an alias refers to a value that contains it; write it out")
        self._within.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and _kind(node) == "map":
                return self._mapping(node, place)
            if isinstance(node, yaml.SequenceNode) and _kind(node) == "seq":
                return [self.build(child, (*place, i)) for i, child in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._within.pop()

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        built: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = self._where(key_node)
            if _kind(key_node) == "merge":  # `<<: *anchor`: the mapping's own keys take precedence
                given = self.build(value_node, (*place, "<<"))
                for each in given if isinstance(given, list) else [given]:
                    if not isinstance(each, dict):
                        raise SmeltError(f"{here}: << takes a mapping, or a list of them")
                    merged = each | merged
                continue
            key = self._scalar(key_node)
            if not isinstance(key, str):
                raise SmeltError(f"{here}: the key {key!r} is not a string; put it in quotes")
            if key in built:
                raise SmeltError(f"{here}: {_cut(key)} is set twice; keep one")
            self.origin[(*place, key)] = here
            built[key] = self.build(value_node, (*place, key))
        return merged | built

    def _scalar(self, node: yaml.Node) -> Any:
        kind, here = _kind(node), self._where(node)
        if kind not in _PLAIN or not isinstance(node, yaml.ScalarNode):
            if kind == "timestamp":
                raise SmeltError(f"{here}: {_shown(str(node.value))} is read as a date by YAML; put it in quotes")
            raise SmeltError(f"{here}: YAML's {node.tag.replace(_TAG, '!!')} is not supported; write a plain value")
        # YAML 1.1 reads 1e-3 as a string because it has no decimal point.
        if node.style is None and _SCIENTIFIC.fullmatch(node.value):
            return float(node.value)
        try:
            value = yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError):
            raise SmeltError(f"{here}: {_shown(node.value)} is not a valid {kind}; correct it") from None
        if isinstance(value, str) and (found := _UNPRINTABLE.search(value)):
            raise SmeltError(f"{here}: {_shown(value)} contains the character U+{ord(found[0]):04X}; remove it")
        if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
            raise SmeltError(f"{here}: {_shown(node.value)} exceeds 64 bits; give a smaller number")
        return value

    def _where(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source


def _kind(node: yaml.Node) -> str:
    return node.tag.removeprefix(_TAG)


def _shown(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
