"""Quantizing a model already in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..recipe.recipe import Recipe
from .pipeline import RunResult, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def quantize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scheme: str = "W4A16",
    rounding: str | dict[str, Any] = "gptq",
    group_size: int | None = None,
    ignore: list[str] | None = None,
    targets: list[str] | None = None,
    output: str | Path,
    calibrate: dict[str, Any] | None = None,
    evaluate: dict[str, Any] | bool = True,
    seed: int = 0,
    progress: bool = True,
) -> RunResult:
    """Quantize a transformers model that is in memory, and write its checkpoint.

    Afterwards ``model`` computes with the quantized weights (restored to its own dtype), so it can be
    evaluated at once. Schemes that also quantize activations do so only in the checkpoint:
    load ``result.checkpoint`` to see their full effect.

    Args:
        model: any decoder-only causal LM of transformers.
        tokenizer: its tokenizer.
        scheme: as in a recipe's ``quantize`` step.
        rounding: likewise.
        group_size: likewise.
        ignore: likewise.
        targets: likewise.
        output: a directory for the checkpoint, the report and the journal; an earlier run in it is replaced.
        calibrate: a recipe's ``calibrate`` section, such as ``{"source": "mine.txt", "samples": 128}``.
        evaluate: a recipe's ``evaluate`` section, or False for none.
        seed: chooses calibration windows.
        progress: show progress bars when standard error is a terminal.

    Returns:
        The checkpoint's path and the report.

    Raises:
        SmeltError: something cannot work; the model is unchanged.

    Example:
        >>> result = quantize(model, tokenizer, scheme="W4A16", rounding="gptq", group_size=64, output="out")
        >>> AutoModelForCausalLM.from_pretrained(result.checkpoint)
    """
    step: dict[str, Any] = {"scheme": scheme, "rounding": rounding}
    step |= {k: v for k, v in (("group_size", group_size), ("ignore", ignore), ("targets", targets)) if v is not None}
    with tempfile.TemporaryDirectory(prefix="smelt-") as original:
        settings: dict[str, Any] = {
            "model": original,
            "output": str(output),
            "seed": seed,
            "steps": [{"quantize": step}],
            "calibrate": calibrate or {},
            "evaluate": {} if evaluate is True else evaluate,
        }
        recipe = Recipe.of(settings)
        model.save_pretrained(original)
        tokenizer.save_pretrained(original)
        label = model.config._name_or_path or type(model).__name__
        # Each process of a training script has the model in its own memory.
        result = run(recipe, fresh=True, progress=progress, name=label, alone=True)
    _take_over(model, result.checkpoint)
    return result


def _take_over(model: PreTrainedModel, checkpoint: Path) -> None:
    """Give ``model`` the checkpoint's weights, restored as transformers loads them."""
    from transformers import AutoModelForCausalLM

    from ..integrations.transformers import config_for

    dense = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=model.dtype, config=config_for(checkpoint))
    with torch.no_grad():
        head = model.get_output_embeddings()
        assert head is not None
        if model.config.tie_word_embeddings and not dense.config.tie_word_embeddings:
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
            model.config.tie_word_embeddings = False
        model.load_state_dict(dense.state_dict(), strict=True)
