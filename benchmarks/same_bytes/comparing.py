"""What differs between two results, in words."""

from __future__ import annotations

from typing import Any

DIFFERENCES_SHOWN = 8


def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Print a line for each recipe; returns 1 if anything differs."""
    for name in sorted(one["origin"].keys() - {"smelt", "commit"}):
        if one["origin"][name] != other["origin"].get(name):
            print(f"note: {name} {one['origin'][name]} and {other['origin'].get(name)}")
    print(f"{one['origin']['commit']} and {other['origin']['commit']}:")
    failed = 0
    for name in dict.fromkeys([*one["results"], *other["results"]]):
        found = differences(one["results"].get(name), other["results"].get(name))
        print(f"{name}: {'; '.join(found) or 'same'}")
        failed += bool(found)
    return int(failed > 0)


def differences(one: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    """What differs between two results of a recipe, in words."""
    if one is None or other is None:
        return [f"only in the {'second' if one is None else 'first'}"]
    if one["error"] or other["error"]:
        sides = (("first", one), ("second", other))
        return [f"failed in the {side}: {result['error']}" for side, result in sides if result["error"]]
    found = ["not the same recipe"] if one["asked"] != other["asked"] else []
    for name in sorted(one["files"].keys() | other["files"].keys()):
        mine, theirs = one["files"].get(name), other["files"].get(name)
        if mine is None or theirs is None:
            found.append(f"{name} only in the {'second' if mine is None else 'first'}")
        elif mine != theirs:
            found.append(f"{name} ({_named(mine.get('parts', {}), theirs.get('parts', {}))})")
    return found


def _named(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Which parts of a file differ; the first of many."""
    names = [name for name in [*mine, *(theirs.keys() - mine.keys())] if mine.get(name) != theirs.get(name)]
    if not names:
        return "its bytes" if not mine else "its parts are the same, but not its bytes"
    more = len(names) - DIFFERENCES_SHOWN
    return ", ".join(names[:DIFFERENCES_SHOWN]) + (f" and {more} more" if more > 0 else "")
