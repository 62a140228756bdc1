"""The recipe of a drafter: fewer bits or fewer of a model's blocks, trained on the model's own text to agree with it."""

from __future__ import annotations

from typing import Any

from ...models.directory.find import find_configuration
from ...quant.scheme_names import OWN_ROUNDING
from ...system.errors import SmeltError
from ...system.settings.checked import checked
from .recipe import Recipe

# How what a drafter gains is measured.
MEASURED: dict[str, Any] = {
    "samples": 0,
    "speed": {"prompt": 64, "generate": 64, "concurrency": [1, 4, 8], "repeats": 9},
}


# Of W4in8: room for training to choose among the upper bits.
GIVE = 0.25
# A rounded model starts near what it is to agree with, one without half of its blocks does not. At 3e-4 smelt-6m's upper bits agreed less often after
# 1.5M tokens than at 1e-4 after 600k.
RATES = {"rounded": 1e-4, "pruned": 1e-3, "head": 1e-3}


def drafter_recipe(
    model: str,
    *,
    output: str,
    blocks: int | None = None,
    tokens: str = "2M",
    data: str = "builtin",
    learning_rate: float | None = None,
    scheme: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Recipe:
    """A recipe that makes a model's drafter.

    Either some of its blocks are removed and the rest is distilled, or its weights are rounded and trained while they are. Scheme W4in8 makes the
    whole model anew, with a drafter in its upper bits. The text is the model's own: there the drafter will have to agree with it. The loss of fewer
    blocks is the total variation, which is the share of draft tokens that exact verification rejects (DistillSpec, arXiv:2310.08461).
    Rounded weights learn by forward KL, as in all quantization-aware training: it gave smelt-6m the same agreement.

    Args:
        model: a directory, hub name or builtin.
        output: the run's directory.
        blocks: how many of the model's blocks it keeps; if None, half of them, or all with W4in8.
        tokens: that are trained on.
        data: text whose beginnings the model continues.
        learning_rate: the peak; if None, one of :data:`RATES`.
        scheme: how it is quantized, if at all: after distillation, or before training if it keeps all blocks.
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
    nested = OWN_ROUNDING.get((scheme or "").upper())
    kept = (count if nested else count // 2) if blocks is None else blocks
    if nested and kept != count:
        raise SmeltError(
            f"--blocks {kept}: with {scheme} the model drafts for itself, with all of its blocks; leave it out"
        )
    if not 1 <= kept <= count:
        raise SmeltError(f"--blocks {kept}: {model} has {count} blocks; keep at least 1 of them")
    if kept == count and scheme is None:
        raise SmeltError(
            f"--blocks {kept}: that is all of {model}; keep fewer, or give a --scheme that it is rounded to"
        )
    if learning_rate is None:
        learning_rate = RATES["rounded" if kept == count else "pruned"]
    training: dict[str, Any] = {
        "teacher": "original",
        "data": {"source": data, "writer": "teacher"},
        "tokens": tokens,
        "loss": "forward_kl" if kept == count else "total_variation",
        "learning_rate": learning_rate,
    }
    if kept == count:
        rounding = {"method": nested, "give": GIVE} if nested else {"method": "gptq"}
        # The head is as much to read for each draft token as any other weight.
        steps = [{"quantize": {"scheme": scheme, "rounding": rounding, "ignore": [], "train": training}}]
    else:
        removed = {"structure": "blocks", "score": "influence", "count": count - kept}
        steps = [{"prune": removed}, {"distill": training}, *([{"quantize": {"scheme": scheme}}] if scheme else [])]
    fields = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "output": output,
        "steps": steps,
        "calibrate": {"device": device},
        "evaluate": {"drafter": "nested" if nested else "result", "device": device, **MEASURED},
    }
    return checked(Recipe, fields, lambda _, what: f"smelt distill: {what}")
