"""The drafter that an engine's configuration names."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ...system.progress import Log
from ..decoder.batch import Run
from ..decoder.draft_inputs import AuxStates
from ..decoder.kv_cache import KeysValues
from ..decoder.model import Model
from ..parallel.stages import RankPlace
from ..speculation.caches import DraftCache, OwnCache, SharedCache
from ..speculation.drafter import Drafter
from ..speculation.eagle.draft_head import DraftHead
from ..speculation.eagle.features import Features
from ..speculation.eagle.head_checkpoint import HeadCheckpoint, is_head
from ..speculation.eagle.head_drafter import HeadCache, HeadDrafter
from ..speculation.length import AdaptiveDrafts, FixedDrafts
from ..speculation.lookup import LookupDrafter
from ..speculation.model_drafter import ModelDrafter
from ..speculation.stepwise import StepwiseDrafter
from ..speculation.times_by_rows import TimesByRows
from ..weights.checkpoint import Checkpoint
from .config import LOOKUP, NESTED, EngineConfig
from .executor import Executor
from .host_blocks import HostBlocks
from .loading import load_model, load_operators, on_device_of

# How many tokens are drafted at most if the number adapts.
_MOST = {True: 16, False: 8}
# Keys and values that differ by less than this share of their size serve both models. Those of models that were trained
# apart differ by more than their size, those of 4-bit weights by a tenth.
_ALIKE = 0.5
_PROBED, _BLOCK = 64, 16
# Steps of these rows are measured at the start, as long as it takes no longer.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MEASURING_SECONDS = 2.0


class DraftWeights(Protocol):
    """What drafts with weights: a model, or a draft head.

    Attributes:
        nbytes: of its weights, besides those that it shares with the verifier.
        is_part: whether its layers are the verifier's own.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def is_part(self) -> bool: ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        ...

    def drafter(
        self,
        model: Model,
        store: KeysValues,
        blocks: int,
        ends: frozenset[int],
        config: EngineConfig,
        *,
        max_length: int,
        host: HostBlocks | None,
    ) -> StepwiseDrafter:
        """The drafter.

        Args:
            model: the verifier.
            store: its keys and values.
            blocks: how many blocks they have.
            ends: tokens that end a sequence.
            config: of the engine.
            max_length: the most tokens of a sequence.
            host: holds the verifier's blocks that are swapped out; None if none are.
        """
        ...


def load_drafter(
    config: EngineConfig, opened: Checkpoint, verifier: Model, place: RankPlace, *, log: Log
) -> DraftWeights | None:
    """Load what a configuration names; None if that has no weights, and on all ranks but the first, which drafts for all.

    Args:
        config: of the engine.
        opened: the verifier's checkpoint.
        verifier: the model that verifies, or this rank's part of it.
        place: this process' among those that compute the model.
        log: gets messages for the user.

    Raises:
        SmeltError: it cannot be read, or does not fit the verifier.
    """
    if config.drafter in (None, LOOKUP) or place.world.rank > 0:
        return None
    if config.drafter == NESTED:
        return DraftModel.nested(opened, verifier, log=log)
    if config.exit_layer is not None:
        return DraftModel.early_exit(verifier, config.exit_layer, log=log)
    assert config.drafter is not None
    path = Path(config.drafter)
    if not path.is_dir():
        raise RuntimeProblem(
            f"drafter is {config.drafter}; it must be {LOOKUP}, {NESTED}, early-exit:N or a checkpoint's directory"
        )
    if is_head(path):
        return LoadedHead.load(path, config, verifier, log=log)
    return DraftModel.load(path, config, opened, verifier, log=log)


@dataclass(frozen=True)
class LoadedHead:
    """A draft head.

    Attributes:
        head: the head.
    """

    head: DraftHead
    is_part = False

    @classmethod
    def load(cls, path: Path, config: EngineConfig, verifier: Model, *, log: Log) -> Self:
        """Load one for a model.

        Args:
            path: its directory.
            config: of the engine.
            verifier: the model that verifies.
            log: gets messages for the user.

        Raises:
            SmeltError: it cannot be read, or does not fit the verifier.
        """
        if config.ranks > 1:
            raise RuntimeProblem(
                f"drafter is {path}, a draft head, which reads what all layers leave, and {config.division}; use lookup or a model"
            )
        if config.compile:
            raise RuntimeProblem(
                f"drafter is {path}, a draft head, which reads what is between layers that compile joins; leave compile out"
            )
        head = DraftHead(HeadCheckpoint(path), verifier, load_operators(verifier.dtype, config, log=log, drafts=True))
        where = ", ".join(map(str, head.after))
        log(f"a draft head of one layer reads what the model leaves after {where} of {len(verifier.layers)} layers")
        return cls(head)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, besides those that it shares with the verifier."""
        return self.head.nbytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        return self.head.block_bytes(block_size)

    def drafter(
        self,
        model: Model,
        store: KeysValues,
        blocks: int,
        ends: frozenset[int],
        config: EngineConfig,
        *,
        max_length: int,
        host: HostBlocks | None,
    ) -> HeadDrafter:
        """The drafter, for which the model's steps leave features from here on."""
        head, size = self.head, config.block_positions
        features = Features(head.fuse, blocks, size, head.hidden, head.dtype, head.device)
        model.aux = AuxStates(head.after, store, features.write)
        if host is not None:
            host.hold(features.by_block())
        return HeadDrafter(
            head,
            HeadCache(head.keys_values(blocks, size), blocks),
            features,
            on_device_of(model),
            vocabulary=model.spec.vocabulary,
            longest=max_length,
            ends=ends,
            seed=config.seed,
            token_budget=config.token_budget,
        )


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts.

    Attributes:
        model: the drafter.
        shares: whether it uses the verifier's keys and values.
        nbytes: of its weights, besides those that it shares with the verifier.
        is_part: whether its layers are the verifier's own.
    """

    model: Model
    shares: bool
    nbytes: int
    is_part: bool = False

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
            expert_parallel=False,
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
    def nested(cls, opened: Checkpoint, verifier: Model, *, log: Log) -> Self:
        """The upper planes of the verifier's own weights.

        Raises:
            RuntimeProblem: it has none.
        """
        operators = verifier.operators.upper()
        if operators is None:
            raise RuntimeProblem(
                "drafter is nested, but the checkpoint has no weights of 8 bits without zero-points that Smelt's kernels compute here; quantize it"
                " with scheme W4in8, or use another drafter"
            )
        model = Model(opened, operators)
        model.share_tables(verifier)
        log("the upper four of 8 bits draft")
        return cls(model, shares=True, nbytes=0)

    @classmethod
    def early_exit(cls, verifier: Model, layers: int, *, log: Log) -> Self:
        """The verifier's own first layers with its lm_head.

        Raises:
            RuntimeProblem: it has no more than that.
        """
        if layers >= len(verifier.layers):
            raise RuntimeProblem(
                f"drafter is early-exit:{layers}, but the model has {len(verifier.layers)} layers; give fewer"
            )
        log(f"the first {layers} of {len(verifier.layers)} layers draft")
        return cls(verifier.first_layers(layers), shares=True, nbytes=0, is_part=True)

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        if self.shares:
            return 0
        model = self.model
        return model.operators.block_bytes(model.cached_heads, model.spec.head_size, block_size, model.dtype)

    def drafter(
        self,
        model: Model,
        store: KeysValues,
        blocks: int,
        ends: frozenset[int],
        config: EngineConfig,
        *,
        max_length: int,
        host: HostBlocks | None,
    ) -> ModelDrafter:
        """The drafter."""
        cache: DraftCache = SharedCache(store)
        if not self.shares:
            cache = OwnCache(self.model.keys_values(blocks, config.block_positions, self.model.dtype), blocks)
        return ModelDrafter(
            self.model,
            cache,
            on_device_of(self.model),
            vocabulary=model.spec.vocabulary,
            ends=ends,
            seed=config.seed,
            token_budget=config.token_budget,
        )


def drafting_of(config: EngineConfig, drafter: Drafter, executor: Executor) -> FixedDrafts:
    """How many tokens a drafter proposes.

    Args:
        config: of the engine.
        drafter: the drafter.
        executor: whose steps are measured if the number adapts; its cache holds nothing yet.
    """
    if isinstance(config.draft_tokens, int):
        return FixedDrafts(config.draft_tokens, config.draft_branches, drafter.longest_branch)
    looks_up = isinstance(drafter, LookupDrafter)
    drafting = None
    if isinstance(drafter, StepwiseDrafter):
        drafting = _measured(partial(executor.timed, drafts=True), config.max_sequences)
    verifying = _measured(partial(executor.timed, drafts=False), config.token_budget)
    branches, longest = config.draft_branches, drafter.longest_branch
    return AdaptiveDrafts(_MOST[looks_up], verifying, drafting, drafter.unprepared, branches, longest)


def _measured(compute: Callable[[int], Tensor], most: int) -> TimesByRows:
    """Times of a model's steps, by rows."""
    times, begun = TimesByRows(), time.perf_counter()
    for rows in _ROWS:
        if rows > most or (rows > 2 and time.perf_counter() - begun > _MEASURING_SECONDS):
            break
        took = []
        for _ in range(3 if times.is_known else 5):  # the first ones are slow
            started = time.perf_counter()
            compute(rows).cpu()
            took.append(time.perf_counter() - started)
        times.measured(rows, statistics.median(took))
    return times


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
