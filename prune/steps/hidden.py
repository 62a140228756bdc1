"""The prune step for the residual stream: which of its directions to keep, throughout the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import streamed_model
from ...models.steps.parts import tensors_once
from ...models.steps.record import LayerRecord, significant
from ...models.steps.smaller_model import computes_the_same, few_tokens, write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...models.structure.untied_head import with_untied_head
from ...quant.transforms.links import norm_offset
from ...quant.transforms.rotated_model import ModelRotation, Residual, RotationError, rotated
from ...quant.transforms.rotation import Rotation
from ...system.errors import SmeltError
from ...system.hardware.device import on
from ...system.hardware.resources import Cost
from ...system.storage.tensor_files import SafetensorsFile, save_tensors
from ..score.hidden import HIDDEN_SCORES, HiddenFacts, watch_norms
from ..settings.hidden import PruneHidden
from ..structure import axes
from ..structure.axes import Axis
from ..structure.slice_width import slice_width
from .prepared import PreparedPrune
from .scoring_cost import scoring_cost


class PruneHiddenStep(Step[PruneHidden]):
    """Remove hidden channels, and slice every matrix that reads or writes them."""

    @property
    def score(self) -> str:
        """What ranks its directions."""
        return self.settings.score or "pca"

    @property
    def changes_zeros(self) -> str | None:
        return f"score: {self.score}" if HIDDEN_SCORES[self.score].rotates else None  # a rotation mixes weights

    @property
    def label(self) -> str:
        size, ratio = self.settings.size, self.settings.ratio
        return (
            f"{size} hidden kept by {self.score}" if ratio is None else f"{ratio:.0%} of hidden removed by {self.score}"
        )

    def prepare(self, given: Given) -> PreparedHidden:
        return PreparedHidden(self, given.model)


class PreparedHidden(PreparedPrune[PruneHidden]):
    """Narrowing the residual stream of one model."""

    def __init__(self, step: PruneHiddenStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self._score = step.score
        try:
            # Folding a norm into lm_head needs an untied lm_head.
            self._source = _untied(model) if HIDDEN_SCORES[step.score].rotates else model
            self._axis = axes.hidden(self._source).in_multiples_of(step.settings.multiple)
            if HIDDEN_SCORES[step.score].rotates:
                check_rotates(model)
        except SmeltError as error:
            advice = "; use score: activation" if isinstance(error, RotationError) else ""
            raise self._wrong("structure", f"{error}{advice}") from None
        self._left = self._units_left()
        try:
            self.output = slice_width(self._source, self._axis, self._left)
        except SmeltError as error:
            possible = [str(units) for units in axes.possible_units(model, self._axis)]
            why = str(error).rsplit("Error: ", 1)[-1].rstrip(".)")
            what = (
                f"leaves {self._left} of {self._axis.units} {self._axis.noun}, which its configuration does not allow"
            )
            raise self._wrong_amount(f"{what} ({why}); possible sizes: {', '.join(possible)}") from None

    def _units_left(self) -> int:
        axis, size = self._axis, self.settings.size
        left = axis.left(self.settings.ratio) if self.settings.ratio is not None else size or 0
        if left > axis.units or (left == axis.units and size is not None):
            raise self._wrong_amount(f"keeps all of {axis.units} {axis.noun}; give a smaller size")
        if left < 1:
            raise self._wrong_amount(f"leaves none of {axis.units} {axis.noun}; lower it")
        if left == axis.units:
            raise self._wrong_amount(
                f"removes none of {axis.units} {axis.noun}, which are removed in {axis.multiple}s; raise it"
            )
        return left

    def plan(self) -> RecipeStepPlan:
        axis, left = self._axis, self._left
        untied = " (lm_head is untied)" if self._score == "pca" and self.model.is_tied else ""
        facts = {"score": self._score, "units_before": axis.units, "units_after": left}
        planned = self._planned(facts, f"{axis.noun} from {axis.units} to {left} by {self._score}", self.output)
        return replace(planned, sentence=planned.sentence + untied)

    def cost(self, windows: int, length: int) -> Cost:
        model = self.model
        if self._score != "pca":
            gradients = 2.5 if self._score == "taylor" else None
            return scoring_cost(model, windows, length, tables=2, gradients=gradients)
        hidden, blocks = model.skeleton.hidden_size, len(model.anatomy.blocks)
        cost = scoring_cost(model, windows, length, tables=2, matrices=4 * hidden**2 * 8)
        directions = 2 * blocks * (3.0 * windows * length * hidden**2) + 20.0 * hidden**3
        rotating = 4.0 * sum(model.block_numels) * hidden
        return cost + Cost(0, 0, directions) + Cost(0, 0, rotating)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, axis, source = self.model, self._axis, self._source
        context.processes.in_main(lambda: self._try_layout(context))
        stays, shares = self._decided(context)
        if not context.processes.is_main:
            return None
        if stays.rotation is not None:
            residual = Residual.find(model)
            rotation = ModelRotation(Rotation.dense(stays.rotation), (None,) * len(residual.blocks))
            source = OpenModel(source.directory, rotated(source, residual, rotation).weights, is_edited=True)
        narrow = slice_width(source, axis, {"": stays.kept})
        changed = self._compensation(source, narrow, shares, context)
        file = context.journal / "changed.safetensors"
        save_tensors(file, changed)
        stored = SafetensorsFile(file)
        after = slice_width(source, axis, {"": stays.kept}, dict.fromkeys(changed, stored))
        write_model(after, model, target)
        least = min(shares.values())
        done = f"{len(stays.kept)} of {axis.units} {axis.noun} are left; they hold at least {least:.1%} of the energy of the norms' inputs"
        untied = [] if stays.rotation is None or not model.is_tied else ["lm_head was untied"]
        layers = [
            LayerRecord(norm, (1, len(stays.kept)), self.label, significant(max(0.0, 1 - share)), []).as_data()
            for norm, share in shares.items()
        ]
        return self._record([done, *untied], layers)

    def _try_layout(self, context: RunContext) -> None:
        """Check that the model computes the same with its hidden channels permuted."""
        model, axis = self._source, self._axis
        order = torch.randperm(axis.units, generator=torch.Generator().manual_seed(context.seed))
        if not computes_the_same(model, slice_width(model, axis, {"": order}), context, order):
            raise SmeltError(
                f"{self._where}: {model.architecture} depends on the order of its {axis.noun}; they cannot be pruned"
            )

    def _decided(self, context: RunContext) -> tuple[_Stays, dict[str, float]]:
        """What is kept, and its share of each norm's input energy; saved for a resumed run."""
        context.journal.mkdir(parents=True, exist_ok=True)
        model, axis, processes = self.model, self._axis, context.processes
        streamed = streamed_model(model, context)
        # Found by separate experiments, on the CPU.
        norms = _residual_norms(model) if HIDDEN_SCORES[self._score].rotates else _norms(model, axis)
        with on(processes.device), torch.no_grad():
            stored = tensors_once(
                context.journal / "stays.safetensors",
                processes,
                lambda: self._chosen(HiddenFacts(model, axis, norms, streamed, context)).as_tensors(),
            )
            stays = _Stays(stored["kept"].cpu(), stored["rotation"].cpu() if "rotation" in stored else None)
            stored = tensors_once(
                context.journal / "shares.safetensors",
                processes,
                lambda: self._kept_energy(streamed, stays, context),
            )
        shares = {name: float(sums[0] / sums[1]) for name, sums in stored.items()}
        for name, share in shares.items():
            if not 0 < share <= 1.0001:
                raise SmeltError(f"{name}: its inputs on the calibration text are not finite, or zero; use other text")
        return stays, shares

    def _chosen(self, facts: HiddenFacts) -> _Stays:
        score = HIDDEN_SCORES[self._score]
        if score.directions is not None:
            return _Stays(torch.arange(self._left, device="cpu"), score.directions(facts).cpu())
        assert score.channels is not None
        scores = score.channels(facts)
        if not scores.isfinite().all():
            raise SmeltError("the scores of the residual stream are not finite; use other text or another score")
        return _Stays(scores.topk(self._left).indices.sort().values.cpu(), None)

    def _kept_energy(self, streamed: StreamedModel, stays: _Stays, context: RunContext) -> dict[str, Tensor]:
        """For each norm, the kept part of its inputs' energy, and the number of tokens."""
        sums = {norm: torch.zeros(2, dtype=torch.float64) for norm in _norms(self.model, self._axis)}
        kept = stays.kept.to(context.processes.device)
        rotation = (
            None if stays.rotation is None else stays.rotation.float()[:, stays.kept].to(context.processes.device)
        )

        def adding(total: Tensor) -> Callable[[Tensor], None]:
            def add(hidden: Tensor) -> None:
                rows = hidden.flatten(0, -2).float()
                rotated_to = rows @ rotation if rotation is not None else rows[:, kept]
                whole = rows.square().sum(-1).clamp_min(1e-30)
                total[0] += (rotated_to.square().sum(-1) / whole).sum().double()
                total[1] += len(rows)

            return add

        description = "measuring the energy kept"
        watch_norms(self.model, streamed, {norm: adding(total) for norm, total in sums.items()}, context, description)
        for total in sums.values():
            context.processes.sum_(total)
        return sums

    def _compensation(
        self, source: OpenModel, narrow: OpenModel, shares: dict[str, float], context: RunContext
    ) -> dict[str, Tensor]:
        """Gains of norms that restore the size of the kept channels; and of the embedding, if needed."""
        found: dict[str, Tensor] = {}
        units, left = self._axis.units, narrow.skeleton.hidden_size
        final = None
        for norm, share in shares.items():
            name = f"{norm}.weight"
            key = source.names[name]
            offset = norm_offset(_own_copy(source, norm), units) or 0.0
            # A norm now divides by the mean over fewer channels, which hold only a share of the energy.
            factor = (share * units / left) ** 0.5
            found[key] = ((narrow.weights.load(key).double() + offset) * factor - offset).to(
                narrow.weights.info(key).dtype
            )
            final = norm if not norm.startswith(source.skeleton.blocks_name) else final
        scale = self._embedding_scale(source, narrow, context)
        if abs(scale - 1) > 1e-4:
            key = source.embedding_key
            found[key] = (narrow.weights.load(key).double() / scale).to(narrow.weights.info(key).dtype)
            if source.is_tied:
                if final is None:
                    raise SmeltError(
                        f"{self._where}: {source.architecture} scales embeddings by the hidden size,"
                        " which cannot be compensated; choose another structure"
                    )
                key = source.names[f"{final}.weight"]
                offset = norm_offset(_own_copy(source, final), units) or 0.0
                found[key] = ((found[key].double() + offset) * scale - offset).to(found[key].dtype)
        return found

    def _embedding_scale(self, source: OpenModel, narrow: OpenModel, context: RunContext) -> float:
        """How much smaller the narrow model's first hidden states are: Gemma multiplies by the hidden size's root."""
        tokens, sizes = few_tokens(context), []
        for each in (source, narrow):
            streamed = StreamedModel(each.skeleton, each.weights, torch.float32, context.journal)
            with closing(streamed.embed(tokens)) as store:
                table = each.weights.load(each.embedding_key)
                sizes.append((store.read(slice(None)).double().norm() / table[tokens[0]].double().norm()).item())
        return sizes[1] / sizes[0]


def check_rotates(model: OpenModel) -> None:
    """Check that hidden states can be rotated to their principal directions.

    Raises:
        RotationError: they cannot, and why.
    """
    if Residual.find(model).centred:
        raise RotationError(
            "its hidden states cannot be rotated to their principal directions: its norms subtract the mean"
        )


@dataclass(frozen=True)
class _Stays:
    """The kept part of the hidden states: some channels, after the rotation, if any."""

    kept: Tensor
    rotation: Tensor | None

    def as_tensors(self) -> dict[str, Tensor]:
        return {"kept": self.kept} if self.rotation is None else {"kept": self.kept, "rotation": self.rotation}


def _untied(model: OpenModel) -> OpenModel:
    """The model, and its configuration, with an untied lm_head."""
    if not model.is_tied:
        return model
    directory = model.directory.changed({"tie_word_embeddings": False})
    return OpenModel(directory, with_untied_head(model).weights, is_edited=model.is_edited)


def _norms(model: OpenModel, axis: Axis) -> list[str]:
    """All norms over the hidden channels."""
    return [
        name.removesuffix(".weight")
        for name, span in axis.readers[""].items()
        if name.endswith(".weight") and span.dim == 0 and model.skeleton.parameters()[name].dim() == 1
    ]


def _residual_norms(model: OpenModel) -> list[str]:
    """The norms that read the residual stream itself."""
    residual = Residual.find(model)
    found = [
        f"{anatomy.name}.{link.feeder}"
        for anatomy, block in zip(model.anatomy.blocks, residual.blocks, strict=True)
        for link in block.norms
    ]
    return list(dict.fromkeys([*found, *([residual.outer.norm] if residual.outer.norm else [])]))


def _own_copy(model: OpenModel, norm: str) -> nn.Module:
    """A norm with real parameters, for experiments."""

    module = copy.deepcopy(model.skeleton.model.get_submodule(norm))
    return nn.Module.to_empty(module, device="cpu").double()
