"""A step's transforms: what they need, what stands against them, and how they are applied to a model and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...quant.layer_stats import LayerStats
from ...quant.scheme import Scheme
from ...quant.transforms import TRANSFORMS
from ...quant.transforms.link import Link
from ...quant.transforms.options import RotateOptions
from ...quant.transforms.transform import TransformOptions
from ...system.errors import Problem, SmeltError
from ..anatomy import SharedInput
from ..links import LinkNames, as_rows, bind
from ..open_model import OpenModel
from ..recipe import TransformChoice
from ..resources import Cost
from ..turned import Streams, Turn, turned
from .block_passes import BlockPasses
from .learned_turn import learned_turn, learning_cost
from .step import RunContext


class Transforms:
    """A list of transforms.

    Args:
        choices: the recipe's list.
        where: how messages name the step.
    """

    def __init__(self, choices: list[TransformChoice], where: str) -> None:
        self._where = where
        self._choices = choices
        self.streams = [choice for choice in choices if TRANSFORMS[choice.method].stream]
        self.links = [choice for choice in choices if TRANSFORMS[choice.method].link]
        self.ranges = [choice for choice in choices if TRANSFORMS[choice.method].range]
        self._found: Streams | None = None

    def __bool__(self) -> bool:
        return bool(self._choices)

    @property
    def change_weights(self) -> bool:
        """Whether what is rounded is not what the checkpoint holds."""
        return bool(self.streams or self.links)

    def problems(self, model: OpenModel) -> list[Problem]:
        """What stands between these transforms and a model."""
        problems = []
        moved: str | None = None
        for i, choice in enumerate(self._choices):
            if TRANSFORMS[choice.method].link:
                moved = moved or choice.method
            elif TRANSFORMS[choice.method].stream and moved:
                problems.append(
                    Problem(
                        f"{self._where}.transforms.{i}",
                        f"{choice.method} folds norms into the linears, which undoes the scales that {moved} moved into"
                        f" them; put {choice.method} before {moved}",
                    )
                )
        if [choice.method for choice in self.streams].count("rotate") > 1:
            problems.append(Problem(f"{self._where}.transforms", "two rotations are one rotation; keep one rotate"))
        if self.streams:
            try:
                self._streams(model)
            except SmeltError as error:
                problems.append(Problem(f"{self._where}.transforms", f"{self.streams[0].method}: {error}"))
        return problems

    def opened(self, model: OpenModel, seed: int, context: RunContext | None = None) -> OpenModel:
        """The model with its residual stream changed, if these transforms change it; the same function in any case.

        Args:
            model: the model.
            seed: of rotations that name none.
            context: the run; without it rotations that would be learned stay random.
        """
        if not self.streams:
            return model
        streams = self._streams(model)
        turn = Turn.none(streams)
        for choice in self.streams:
            options = choice.settled()
            if isinstance(options, RotateOptions):
                seed = seed if options.seed is None else options.seed
                turn = Turn.random(streams, model.skeleton.hidden_size, seed)
                if not options.heads:
                    turn = Turn(turn.stream, (None,) * len(streams.blocks))
                if options.learn and context is not None:
                    turn = learned_turn(model, streams, turn, options.learn, seed, context)
        return turned(model, streams, turn)

    def cost(self, model: OpenModel, tokens: int) -> Cost:
        """What learning rotations takes."""
        learned = [o.learn for c in self.streams if isinstance(o := c.settled(), RotateOptions) and o.learn]
        return learning_cost(model, self._streams(model), learned[0], tokens) if learned else Cost(0, 0, 0.0)

    def apply(
        self,
        passes: BlockPasses,
        links: tuple[LinkNames, ...],
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        stored: torch.dtype,
    ) -> None:
        """Move scales within a block, one transform after another; the block computes with the result.

        Args:
            passes: the block and the windows that enter it.
            links: where scales can move.
            weights: the block's parameters as float32, matrices as ``[rows, columns]``; edited in place.
            schemes: what each linear will be stored as, by its name in the block.
            stored: what the checkpoint stores norms in.
        """
        used = [link for link in links if any(name in schemes for group in link.groups for name in group.linears)]
        for choice in self.links:
            transform, options = TRANSFORMS[choice.method], choice.settled()
            assert transform.link is not None
            groups = [group for link in used for group in link.groups]
            stats: dict[SharedInput, LayerStats] = dict.fromkeys(groups, LayerStats(None, torch.zeros(0, 0), 0))
            if transform.needs_inputs:
                stats = dict(passes.survey(groups))
            move = partial(_move, transform.link, used, weights, stats, schemes, stored, options)
            passes.processes.edited(move, weights.values())
            fill(passes.block, weights, next(passes.block.parameters()).dtype)

    def _streams(self, model: OpenModel) -> Streams:
        if self._found is None:
            self._found = Streams.find(model)
        return self._found


def _move(
    move: Callable[[Link, Any], None],
    links: list[LinkNames],
    weights: dict[str, Tensor],
    stats: dict[SharedInput, LayerStats],
    schemes: dict[str, Scheme],
    stored: torch.dtype,
    options: TransformOptions,
) -> None:
    for link in links:
        move(bind(link, weights, stats, schemes, stored), options)


def fill(block: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Let a block compute with these weights, in ``dtype``."""
    for name, parameter in block.named_parameters():
        module = block.get_submodule(name.rpartition(".")[0])
        parameter.data = as_rows(module, weights[name]).to(dtype)
