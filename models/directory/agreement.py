"""Whether a checkpoint's tensors are those of the model that its ``config.json`` describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ...system.errors import Problem, raise_problems
from ..checkpoint.stored_shapes import StoredShape, stored_shapes
from ..checkpoint.weights import CheckpointWeights
from .empty_model import empty_model

_MOST_LINES = 8


def check_agreement(
    config: PretrainedConfig,
    weights: CheckpointWeights,
    quantization: Mapping[str, Any] | None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Check that the checkpoint has every tensor that ``config`` requires, with its shape, and no more layers or experts.

    Args:
        config: the model's configuration; it is not changed.
        weights: the checkpoint's tensors.
        quantization: its ``quantization_config``, if it has one.
        trust_remote_code: run the model's own Python.

    Raises:
        SmeltError: one line for each tensor that does not fit.
    """
    plain: Any = deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    model, _ = empty_model(plain, torch.float32, trust_remote_code=trust_remote_code)
    match_names(model, parameters_of(model, _tied_head(model)), stored_shapes(weights, quantization))


def parameters_of(model: Any, tied_head: str | None) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of a model by name, except a tied lm_head's weight."""
    tensors: dict[str, Any] = dict(model.state_dict())
    tensors.pop(f"{tied_head}.weight", None)
    return tensors


def _tied_head(model: Any) -> str | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight is not embedding.weight:
        return None
    return next(name for name, module in model.named_modules() if module is head)


def match_names(model: Any, wanted: dict[str, torch.Tensor], stored: Mapping[str, StoredShape]) -> dict[str, str]:
    """The checkpoint's name for each parameter of a model without weights.

    Args:
        model: of transformers, whose checkpoints may use older names.
        wanted: its parameters by name.
        stored: what the checkpoint has.

    Raises:
        SmeltError: one line for each that is missing, has another shape, is no float, or is of a layer that ``model`` lacks.
    """
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    prefix = getattr(model, "base_model_prefix", None)
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    for key in stored:
        # Old GPT-2 and GPT-NeoX checkpoints contain masks that transformers no longer has; they match nothing.
        name, _ = rename_source_key(key, renamings, [], prefix, wanted)
        (found if name in wanted else others)[name] = key
    problems = [
        Problem(name, "the checkpoint lacks this tensor, which config.json requires; download the model again")
        for name in wanted
        if name not in found
    ]
    for name, key in found.items():
        shape, is_bare_integer = stored[key]
        expected = tuple(wanted[name].shape)
        if len(shape) != len(expected) or any(a not in (None, b) for a, b in zip(shape, expected, strict=True)):
            sentence = (
                f"the checkpoint stores {shape}, but config.json implies {expected}; they belong to different models"
            )
            problems.append(Problem(name, sentence))
        elif is_bare_integer and wanted[name].is_floating_point():
            sentence = (
                "the checkpoint stores integers without a scale where the model has floats; download the model again"
            )
            problems.append(Problem(name, sentence))
    problems += _beyond(model, wanted, others)
    if len(problems) > _MOST_LINES:
        rest = len(problems) - _MOST_LINES
        problems = [*problems[:_MOST_LINES], Problem("config.json", f"… and {rest} more tensors do not match")]
    raise_problems(problems)
    return found


def _beyond(model: Any, wanted: Mapping[str, torch.Tensor], others: Mapping[str, str]) -> list[Problem]:
    """A tensor of a layer or an expert beyond the configuration's count, if there is one.

    Some families ship layers that transformers ignores, such as those for multi-token prediction.
    """
    known = {numberless(name) for name in wanted}
    left_out = getattr(type(model), "_keys_to_ignore_on_load_unexpected", None) or []
    for name, key in others.items():
        if numberless(name) in known and not any(re.search(pattern, name) for pattern in left_out):
            return [
                Problem(
                    key,
                    "the checkpoint has more layers or experts than config.json says; they belong to different models, or"
                    " num_hidden_layers is wrong",
                )
            ]
    return []


def numberless(name: str) -> str:
    """A tensor's name with ``*`` for the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
