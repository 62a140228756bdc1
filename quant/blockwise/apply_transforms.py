"""A step's transforms: what they need, what prevents them, and how they are applied to a model and its blocks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from ...models.steps.step import RunContext
from ...models.structure.anatomy import SharedInput
from ...models.structure.open_model import OpenModel
from ...system.errors import Problem, SmeltError
from ...system.hardware.resources import Cost
from ..layer_stats import LayerStats
from ..scheme import Scheme
from ..settings.methods import TransformChoice
from ..transforms import TRANSFORMS
from ..transforms.links import LinkNames, as_rows, bind
from ..transforms.rotated_model import ModelRotation, Residual, rotated
from .block_passes import BlockPasses
from .learned_rotation import learned_model_rotation, learning_cost


class Transforms:
    """A list of transforms.

    Args:
        choices: the recipe's list.
        where: how messages name the step.
    """

    def __init__(self, choices: list[TransformChoice], where: str) -> None:
        self._where = where
        self._choices = choices
        self.of_residual = [choice for choice in choices if TRANSFORMS[choice.method].residual]
        self.links = [choice for choice in choices if TRANSFORMS[choice.method].link]
        self.ranges = [choice for choice in choices if TRANSFORMS[choice.method].range]
        self._found: Residual | None = None

    def __bool__(self) -> bool:
        return bool(self._choices)

    @property
    def change_weights(self) -> bool:
        """Whether they change the weights before rounding."""
        return bool(self.of_residual or self.links)

    @property
    def reads_inputs(self) -> list[str]:
        """Those that need layer inputs on a calibration text."""
        return [f"transform {choice.method}" for choice in self._choices if choice.settled().reads_inputs]

    def problems(self, model: OpenModel) -> list[Problem]:
        """Why these transforms cannot be applied to a model."""
        problems = []
        moved: str | None = None
        for i, choice in enumerate(self._choices):
            if TRANSFORMS[choice.method].link:
                moved = moved or choice.method
            elif TRANSFORMS[choice.method].residual and moved:
                problems.append(
                    Problem(
                        f"{self._where}.transforms.{i}",
                        f"{choice.method} folds norms into the linears, which undoes the scales that {moved} moved into"
                        f" them; put {choice.method} before {moved}",
                    )
                )
        rotations = [choice.method for choice in self.of_residual if TRANSFORMS[choice.method].rotation]
        if len(rotations) > 1:
            problems.append(
                Problem(f"{self._where}.transforms", f"two rotations compose to one; keep one {rotations[0]}")
            )
        if self.of_residual:
            try:
                self._residual(model)
            except SmeltError as error:
                problems.append(Problem(f"{self._where}.transforms", f"{self.of_residual[0].method}: {error}"))
        return problems

    def opened(self, model: OpenModel, seed: int, context: RunContext | None = None) -> OpenModel:
        """The model with its residual stream rotated, if these transforms do that; its function does not change.

        Args:
            model: the model.
            seed: of rotations that set none.
            context: the run; without it, learned rotations stay random.
        """
        if not self.of_residual:
            return model
        residual = self._residual(model)
        rotation = ModelRotation.none(residual)
        for choice in self.of_residual:
            draw, options = TRANSFORMS[choice.method].rotation, choice.settled()
            if draw is not None:
                seed, steps = options.seed_in(seed), options.learning_steps
                rotation = draw(residual, model.skeleton.hidden_size, seed, options)
                if steps and context is not None:
                    rotation = learned_model_rotation(model, residual, rotation, steps, seed, context)
        return rotated(model, residual, rotation)

    def cost(self, model: OpenModel, tokens: int) -> Cost:
        """The cost of learning rotations."""
        learned = [steps for choice in self.of_residual if (steps := choice.settled().learning_steps)]
        return learning_cost(model, self._residual(model), learned[0], tokens) if learned else Cost(0, 0, 0.0)

    def apply(
        self,
        passes: BlockPasses,
        links: tuple[LinkNames, ...],
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        stored: torch.dtype,
    ) -> None:
        """Move scales within a block, one transform after another; the block then computes with the result.

        Args:
            passes: the block and the windows that enter it.
            links: where scales can move.
            weights: the block's parameters as float32, matrices as ``[rows, columns]``; edited in place.
            schemes: what each linear will be stored as, by its name in the block.
            stored: what the checkpoint stores norms in.
        """
        used = _used(links, schemes)
        for choice in self.links:
            stats = _unknown(used)
            if choice.settled().reads_inputs:
                stats = dict(passes.statistics(list(stats)))
            passes.processes.edited(partial(_move, choice, used, weights, stats, schemes, stored), weights.values())
            fill(passes.block, weights, next(passes.block.parameters()).dtype)

    def move(
        self,
        links: tuple[LinkNames, ...],
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        stored: torch.dtype,
    ) -> None:
        """Move scales within a block where no transform reads text; see :meth:`apply`."""
        used = _used(links, schemes)
        for choice in self.links:
            _move(choice, used, weights, _unknown(used), schemes, stored)

    def _residual(self, model: OpenModel) -> Residual:
        if self._found is None:
            self._found = Residual.find(model)
        return self._found


def changed_beside(
    model: OpenModel, index: int, weights: dict[str, Tensor], quantized: Collection[str]
) -> dict[str, Tensor]:
    """Unquantized tensors that scales were moved into: norms, biases, routers, ignored linears.

    Args:
        model: whose block it is.
        index: which block.
        weights: the block's parameters as :meth:`Transforms.apply` leaves them.
        quantized: names of the linears in the block that are rounded.

    Returns:
        Tensors as the checkpoint stores them, by its names.
    """
    prefix, block = f"{model.anatomy.blocks[index].name}.", model.skeleton.blocks[index]
    names = {f"{name}.weight" for name in quantized}
    changed = {}
    for name, tensor in weights.items():
        key = model.names[prefix + name]
        if name not in names:
            module = block.get_submodule(name.rpartition(".")[0])
            changed[key] = as_rows(module, tensor).to(model.weights.info(key).dtype).contiguous()
    return changed


def _used(links: tuple[LinkNames, ...], schemes: dict[str, Scheme]) -> list[LinkNames]:
    return [link for link in links if any(name in schemes for group in link.groups for name in group.linears)]


def _unknown(links: list[LinkNames]) -> dict[SharedInput, LayerStats]:
    groups = [group for link in links for group in link.groups]
    return dict.fromkeys(groups, LayerStats(None, torch.zeros(0, 0), 0))


def _move(
    choice: TransformChoice,
    links: list[LinkNames],
    weights: dict[str, Tensor],
    stats: dict[SharedInput, LayerStats],
    schemes: dict[str, Scheme],
    stored: torch.dtype,
) -> None:
    move, options = TRANSFORMS[choice.method].link, choice.settled()
    assert move is not None
    for link in links:
        move(bind(link, weights, stats, schemes, stored), options)


def fill(block: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Let a block compute with these weights, in ``dtype``."""
    for name, parameter in block.named_parameters():
        module = block.get_submodule(name.rpartition(".")[0])
        parameter.data = as_rows(module, weights[name]).to(dtype)
