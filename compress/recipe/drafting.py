"""The recipe of a drafter: fewer of a model's blocks, distilled on the model's own text to agree with it."""

from __future__ import annotations

from typing import Any

from ...models.directory.find import find_configuration
from ...system.errors import SmeltError
from ...system.settings.checked import checked
from .recipe import Recipe

# How what a drafter gains is measured.
MEASURED: dict[str, Any] = {
    "samples": 0,
    "speed": {"prompt": 64, "generate": 64, "concurrency": [1, 4, 8], "repeats": 9},
}


def drafter_recipe(
    model: str,
    *,
    output: str,
    blocks: int | None = None,
    tokens: str = "2M",
    data: str = "builtin",
    learning_rate: float = 1e-3,
    scheme: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Recipe:
    """A recipe that distils a model's drafter.

    The loss is the total variation, which is the share of draft tokens that exact verification rejects (DistillSpec, arXiv:2310.08461), and the
    text is the model's own: there the drafter will have to agree with it.

    Args:
        model: a directory, hub name or builtin.
        output: the run's directory.
        blocks: how many of the model's blocks it keeps; half of them if None.
        tokens: that are trained on.
        data: text whose beginnings the model continues.
        learning_rate: the peak.
        scheme: how it is quantized at last, if at all.
        device: where it is trained and measured.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        SmeltError: the model has not so many blocks, or an argument is not what it should be.
    """
    count = find_configuration(model).config_data().get("num_hidden_layers")
    if not isinstance(count, int) or count < 2:
        raise SmeltError(
            f"model {model}: its config does not say how many blocks it has, or it has one; write a recipe"
        )
    kept = count // 2 if blocks is None else blocks
    if not 1 <= kept < count:
        raise SmeltError(f"--blocks {kept}: {model} has {count} blocks; keep at least 1 and at most {count - 1}")
    steps: list[dict[str, Any]] = [
        {"prune": {"structure": "blocks", "score": "influence", "count": count - kept}},
        {
            "distill": {
                "teacher": "original",
                "data": {"source": data, "writer": "teacher"},
                "tokens": tokens,
                "loss": "total_variation",
                "learning_rate": learning_rate,
            }
        },
    ]
    if scheme is not None:
        steps.append({"quantize": {"scheme": scheme}})
    fields = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "output": output,
        "steps": steps,
        "calibrate": {"device": device},
        "evaluate": {"drafter": "result", "device": device, **MEASURED},
    }
    return checked(Recipe, fields, lambda _, what: f"smelt distill: {what}")
