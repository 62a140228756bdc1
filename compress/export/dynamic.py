"""GPTQModel's field ``dynamic``: layers that differ from most, by regular expressions of their names."""

from __future__ import annotations

import re

# vLLM fuses these and looks up the settings of the fused layer.
_FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


def patterns(kinds: dict[str, str]) -> list[tuple[str, str]]:
    """A regular expression for every kind of layer but the most common, and a layer that it matches.

    A name matches all blocks where they agree, and only its own block where they do not.
    """
    alike: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        alike.setdefault(any_number(name), set()).add(kind)
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        if kind:
            everywhere = len(alike[any_number(name)]) == 1
            for spelling in _spellings(name, kinds):
                found.setdefault(f"^{any_number(spelling) if everywhere else re.escape(spelling)}$", name)
    return list(found.items())


def _spellings(name: str, kinds: dict[str, str]) -> list[str]:
    """A layer's name, and its fused layer's if all parts of that are of one kind."""
    parent, _, leaf = name.rpartition(".")
    for parts, whole in _FUSED.items():
        if leaf == parts[0] and all(kinds.get(f"{parent}.{part}") == kinds[name] for part in parts):
            return [name, f"{parent}.{whole}"]
    return [name]


def any_number(name: str) -> str:
    """A regular expression for a name in all blocks."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
