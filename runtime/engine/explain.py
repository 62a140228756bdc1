"""Which kernels compute a model."""

from __future__ import annotations

from ..decoder.model import Model


def explain(model: Model) -> dict[str, str]:
    """The kernel of each linear, by role; layers with the same one share an entry."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, linear in model.linears().items():
        parts = name.split(" ", 2)
        role, layer = (parts[2], int(parts[1])) if parts[0] == "layer" else (name, -1)
        if role.startswith("expert "):
            role = "experts' " + role.split(" ", 2)[2]
        found.setdefault(role, {}).setdefault(linear.explain(), []).append(layer)
    explanations = {}
    for role, kinds in found.items():
        for explanation, layers in kinds.items():
            where = "" if len(kinds) == 1 else f" of layers {', '.join(map(str, dict.fromkeys(layers)))}"
            explanations[role + where] = explanation
    lowered = model.operators.explain_layers()
    return explanations if lowered is None else {**explanations, "layers": lowered}
