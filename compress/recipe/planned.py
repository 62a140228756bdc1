"""The recipe that makes what ``smelt plan`` recommends."""

from __future__ import annotations

from typing import Any

import yaml

from ...runtime.plan.candidates import PlanCandidate


def planned_recipe(candidate: PlanCandidate, model: str, *, output: str = "runs/planned") -> str | None:
    """The YAML of a recipe; None if a candidate is the model as it is.

    Args:
        candidate: of a plain model.
        model: as recipes name it.
        output: where the recipe writes.
    """
    scheme, cached = candidate.scheme, candidate.kv_cache_dtype != "auto"
    steps: list[dict[str, Any]] = []
    if candidate.dropped:
        steps.append({"prune": {"structure": "blocks", "count": candidate.dropped}})
    cache = {"kv_cache": candidate.kv_cache_dtype} if cached else {}
    if scheme is not None:
        section: dict[str, Any] = {"scheme": scheme.name}
        if scheme.accepts_group_size:
            section["group_size"] = scheme.args.group_size or -1
        section |= {"rounding": "gptq", "ignore": [] if candidate.head is not None else ["lm_head"]}
        steps.append({"quantize": section | cache})
    elif cached:
        # With all linears ignored only the cache is quantized; the scheme must be there, but nothing has it.
        steps.append({"quantize": {"scheme": "W8A16", "ignore": ["Linear", "lm_head"]} | cache})
    if not steps:
        return None
    data = {"model": model, "output": output, "steps": steps}
    return f"# {candidate.label}, as smelt plan recommends.\n{yaml.safe_dump(data, sort_keys=False, width=120)}"
