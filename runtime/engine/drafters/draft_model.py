"""Models that draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from ....system.errors import RuntimeProblem
from ....system.progress import Log
from ...decoder.model import Model
from ...decoder.parts.batch import Run
from ...parallel.stages import RankPlace
from ...speculation.caches import OwnCache, SharedCache
from ...speculation.model_drafter import ModelDrafter
from ...weights.checkpoint import Checkpoint
from ..setup.config import EngineConfig
from ..setup.loading import load_model, on_device_of
from ..setup.parts import EngineParts

# Keys and values that differ by less than this share of their size serve both models. Those of models that were trained
# apart differ by more than their size, those of 4-bit weights by a tenth.
_ALIKE = 0.5
_PROBED, _BLOCK = 64, 16


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts.

    Attributes:
        model: the drafter.
        shares: whether it uses the verifier's keys and values.
        nbytes: of its weights, besides those that it shares with the verifier.
        is_part: whether its layers are the verifier's own.
        is_divided: whether each rank has a part of it, as of the verifier.
        after: none: it reads no states of the verifier's layers.
    """

    model: Model
    shares: bool
    nbytes: int
    is_part: bool = False
    is_divided: bool = False
    after: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: Path, config: EngineConfig, opened: Checkpoint, verifier: Model, *, log: Log) -> Self:
        """Load a checkpoint.

        Args:
            path: its directory.
            config: of the engine.
            opened: the verifier's checkpoint.
            verifier: the model that verifies, or this rank's part of it.
            log: gets messages for the user.

        Raises:
            SmeltError: it cannot be read, or has another tokenizer or vocabulary.
        """
        alone = replace(
            config,
            dtype=str(verifier.dtype).removeprefix("torch."),
            drafter=None,
            draft_tokens="auto",
            draft_branches=0,
            offload=None,
            offload_directory=None,
            reproducible=False,
            tp=1,
            pp=1,
            cp=1,
            enable_expert_parallel=False,
        )
        of_drafter, model = load_model(path, alone, log=log, drafts=True)
        _check_vocabulary(path, opened, of_drafter, verifier, model)
        if config.ranks > 1:
            log("the first rank drafts, with all of the drafter's layers and a cache of its own")
            return cls(model, shares=False, nbytes=model.own_bytes())
        model.share_tables(verifier)
        distance = _distance(verifier, model)
        shares = distance is not None and distance < _ALIKE
        if shares:
            log(f"the drafter's keys and values differ from the model's by {distance:.0%}: both use one cache")
        else:
            why = "have other shapes than" if distance is None else f"differ by {distance:.0%} from"
            log(f"the drafter's keys and values {why} the model's: it has a cache of its own")
        return cls(model, shares, nbytes=model.own_bytes())

    @classmethod
    def nested(cls, opened: Checkpoint, verifier: Model, place: RankPlace, *, divides_experts: bool, log: Log) -> Self:
        """The upper planes of the verifier's own weights. All ranks call it.

        Args:
            opened: the verifier's checkpoint.
            verifier: the model, or this rank's part of it.
            place: this process' among those that compute the model.
            divides_experts: whether each rank has some experts whole.
            log: gets messages for the user.

        Raises:
            RuntimeProblem: no rank's part has any.
        """
        operators = verifier.operators.upper()
        if not any(place.world.gather_data(operators is not None)):
            raise RuntimeProblem(
                "drafter is nested, but the checkpoint has no weights of 8 bits without zero-points that Smelt's kernels compute here; quantize it"
                " with scheme W4in8, or use another drafter"
            )
        model = verifier  # of a stage without such weights
        if operators is not None:
            model = Model(opened, operators, place.ranks, place.stages, place.context, divides_experts=divides_experts)
            model.share_tables(verifier)
        log("the upper four of 8 bits draft")
        return cls(model, shares=True, nbytes=0, is_divided=True)

    @classmethod
    def early_exit(cls, verifier: Model, layers: int, *, log: Log) -> Self:
        """The verifier's own first layers with its lm_head. All ranks call it.

        Raises:
            RuntimeProblem: it has no more than that.
        """
        count = len(verifier.spec.layers)
        if layers >= count:
            raise RuntimeProblem(f"drafter is early-exit:{layers}, but the model has {count} layers; give fewer")
        log(f"the first {layers} of {count} layers draft")
        return cls(verifier.first_layers(layers), shares=True, nbytes=0, is_part=True, is_divided=True)

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        if self.shares:
            return 0
        model = self.model
        return model.operators.block_bytes(model.cached_heads, model.spec.head_size, block_size, model.dtype)

    def step_bytes(self, tokens: int) -> int:
        """Nothing: its steps come between the model's, and are smaller."""
        return 0

    def drafter(self, parts: EngineParts) -> ModelDrafter:
        """The drafter."""
        config, cache = parts.config, SharedCache(parts.store)
        if not self.shares:
            cache = OwnCache(
                self.model.keys_values(parts.blocks, config.block_positions, self.model.dtype), parts.blocks
            )
        return ModelDrafter(self.model, cache, parts.verifying, parts.divided if self.is_divided else None)


def _check_vocabulary(path: Path, opened: Checkpoint, of_drafter: Checkpoint, verifier: Model, model: Model) -> None:
    ours, other = (each.directory for each in (opened, of_drafter))
    if ours.has_tokenizer and other.has_tokenizer:
        if ours.tokenizer().get_vocab() != other.tokenizer().get_vocab():
            raise RuntimeProblem(f"the drafter {path} has another tokenizer than the model; use one with the same")
    elif verifier.spec.vocabulary != model.spec.vocabulary:
        raise RuntimeProblem(
            f"the drafter {path} has a vocabulary of {model.spec.vocabulary} tokens, and the model of"
            f" {verifier.spec.vocabulary}; use one with the same tokenizer"
        )


@torch.inference_mode()
def _distance(verifier: Model, drafter: Model) -> float | None:
    """How far the drafter's keys and values are from the verifier's, in shares of their size; None if their shapes differ."""
    a, b = verifier.spec, drafter.spec
    if verifier.cached_heads != drafter.cached_heads or a.head_size != b.head_size:
        return None
    vocabulary = min(a.vocabulary, b.vocabulary)
    length = min(_PROBED, a.max_length, b.max_length)
    count = -(-length // _BLOCK)
    tokens = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    run = Run(tokens, 0, list(range(count)), length, 1)
    found = []
    for model in (verifier, drafter):
        store = model.keys_values(count, _BLOCK, model.dtype)
        with on_device_of(model):
            model(model.batch([run], _BLOCK), store)
            blocks = torch.arange(count)
            found.append([store.read(layer, blocks, torch.float32) for layer in range(len(model.cached_heads))])
    apart = [
        float((x - y).norm() / x.norm())
        for of_a, of_b in zip(*found, strict=True)
        for x, y in zip(of_a, of_b, strict=True)
    ]
    return sum(apart) / len(apart)
