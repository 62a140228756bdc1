"""Layers of different sizes: ``layer_sizes`` in ``config.json``, which Hugging Face configurations cannot express."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ...system.errors import SmeltError

# For each layer, the fields of the configuration that differ there.
LAYER_SIZES = "layer_sizes"


def config_fields(sizes: list[dict[str, int]]) -> dict[str, Any]:
    """Fields of a configuration with these layer sizes: what all layers share, and the rest, if any, in ``layer_sizes``."""
    common = {name: size for name, size in sizes[0].items() if all(each[name] == size for each in sizes)}
    rest = [{name: size for name, size in each.items() if name not in common} for each in sizes]
    return {**common, LAYER_SIZES: rest if rest[0] else None}


def layer_configs(config: Any) -> list[Any] | None:
    """For each layer, the configuration of a model with only such layers; None if all layers are alike.

    Layers of the same sizes share one.

    Raises:
        SmeltError: ``layer_sizes`` is invalid.
    """
    sizes = getattr(config, LAYER_SIZES, None)
    if sizes is None:
        return None
    depth = config.num_hidden_layers
    if (
        not isinstance(sizes, list)
        or len(sizes) != depth
        or not all(isinstance(each, dict) and each for each in sizes)
        or not all(isinstance(n, int) and n > 0 and hasattr(config, name) for each in sizes for name, n in each.items())
    ):
        raise SmeltError(
            f"config.json: {LAYER_SIZES} must list, for each of {depth} layers, the fields that differ there, such"
            ' as {"intermediate_size": 512}'
        )
    found: dict[tuple[tuple[str, int], ...], Any] = {}
    for each in sizes:
        key = tuple(sorted(each.items()))
        if key not in found:
            found[key] = deepcopy(config)
            delattr(found[key], LAYER_SIZES)
            for name, size in each.items():
                setattr(found[key], name, size)
    return [found[tuple(sorted(each.items()))] for each in sizes]
