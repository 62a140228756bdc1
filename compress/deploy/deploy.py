"""Handing a checkpoint over: what an engine refuses, and what starts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...models.directory.find import find_checkpoint
from ...system.errors import Problem, raise_problems
from ..loaders.facts import facts_of_checkpoint
from ..loaders.rules import VLLM as VLLM_CPU
from ..loaders.rules import Refusal, loaders
from .limits import (
    RAY_LLM,
    SGLANG,
    VLLM_GPU,
    EngineLimits,
    notes,
    refusals,
    refusals_of_config,
    shape_refusals,
    too_long,
)
from .options import DeployOptions, EngineName
from .template_parsers import TemplateParsers
from .written import written

_LIMITS: dict[EngineName, EngineLimits] = {"vllm": VLLM_GPU, "ray-llm": RAY_LLM, "llm-d": VLLM_GPU, "sglang": SGLANG}


@dataclass(frozen=True)
class Deployment:
    """What starts an engine on a checkpoint.

    Attributes:
        text: a command, or a file.
        notes: what works otherwise than it may be thought, one sentence each.
    """

    text: str
    notes: list[str]


def deployment(checkpoint: str, options: DeployOptions) -> Deployment:
    """Check that an engine loads a checkpoint, and write what starts it.

    Args:
        checkpoint: a directory or a run's output directory.
        options: the options.

    Raises:
        SmeltError: the engine cannot load it; a line for each reason.
    """
    directory = find_checkpoint(checkpoint)
    limits = _LIMITS[options.engine]
    found = refusals_of_config(directory, limits)
    facts = None if found else facts_of_checkpoint(directory)
    said: list[str] = []
    name = limits.name
    if options.cpu:
        name = VLLM_CPU
        if facts is not None:
            loader = next(each for each in loaders(facts) if each.name == VLLM_CPU)
            found += [] if loader.loads else [Refusal(loader.why, loader.advice)]
            said += [loader.sentence] if loader.loads and loader.why else []
    elif facts is None:
        found += shape_refusals(replace(directory, as_dense=True).config(), options.tensor_parallel)
    else:
        found += refusals(facts, limits, options.tensor_parallel)
        said += notes(facts, limits)
    found += too_long(directory.config_data(), options.max_model_len)
    raise_problems([Problem(f"{name} cannot load {directory.path}", _sentence(each)) for each in found])
    model_type = str(directory.config_data().get("model_type", ""))
    place = Path(directory.path).resolve()
    return Deployment(written(place, options, TemplateParsers.of(place, model_type)), said)


def _sentence(refusal: Refusal) -> str:
    return refusal.why + (f"; {refusal.advice}" if refusal.advice else "")
