"""Quantization-aware training of a model that a quantize step has rounded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from ...distill.run.checks import teacher_of
from ...distill.run.student import WholeModel
from ...distill.run.training_cost import training_place
from ...distill.run.training_run import Outcome, train
from ...distill.settings import TrainQuantized
from ...distill.training.optimizer import Trained
from ...models.checkpoint.weights import ChangedWeights
from ...models.steps.parts import save_part
from ...models.steps.step import RunContext
from ...models.structure.open_model import LinearFacts, OpenModel
from ...quant.activations import ActivationRounding, quantize_inputs
from ...quant.blockwise.assignment import Treatment
from ...quant.blockwise.embedding import restored_embedding
from ...quant.scheme_names import NESTED
from ...quant.stored.kv_cache import KVRounding, RoundedCache, caches_of
from ...quant.training.nested import NestedQatLinear, upper_bits
from ...quant.training.qat import QatLinear, latent_start, stored_grid, stored_values
from ...quant.transforms.links import as_rows
from ...quant.zeros import not_pruned
from ...system.storage.tensor_files import SafetensorsFile


class QuantizedTraining:
    """Trains a model whose linears a quantize step has rounded.

    Args:
        settings: the recipe's section.
        model: the model that was rounded, after any rotation.
        chosen: each linear's treatment.
        parts: the files of their stored tensors.
        cache: the scheme of the KV cache, if quantized.
        original: the model that the run started from, which may teach it.
        latent_known: whether the model's weights are those that were rounded; transforms of blocks change them first.
    """

    def __init__(
        self,
        settings: TrainQuantized,
        model: OpenModel,
        chosen: Mapping[str, Treatment],
        parts: list[Path],
        cache: QuantizationArgs | None,
        *,
        original: OpenModel,
        latent_known: bool,
    ) -> None:
        self._settings, self._chosen, self._cache = settings, chosen, cache
        self._latent_known, self._original = latent_known, original
        self._model = model
        self._stored = _Stored(parts)
        self._linears: dict[str, QatLinear] = {}
        self._nested = any(each.rounding == "nested" for each in chosen.values())
        self._stays: dict[str, Tensor | None] = {}

    def part(self, context: RunContext) -> Path:
        """The file that replaces the parts it was trained from."""
        return context.journal / "trained.safetensors"

    def run(self, context: RunContext) -> Outcome:
        """Train, in every process; the main one writes the part. An earlier run's result is reused."""
        outcome, trained = self._train(context)
        if self._nested:
            outcome.sentences.append(
                "the upper four of 8 bits were trained and nothing else, and these losses are theirs"
            )
        if context.processes.is_main:
            save_part(self.part(context), self._result(outcome.weights, trained, context.processes.device), [])
        return outcome

    def _train(self, context: RunContext) -> tuple[Outcome, dict[str, Trained]]:
        settings, model = self._settings, self._model
        student = self._student(context)
        if settings.checkpointing:
            student.checkpoint_activations()
        trained = self._trained(student)
        teacher = teacher_of(settings, model, self._original)
        with ExitStack() as hooks:
            self._round_the_rest(student, hooks)
            outcome = train(
                settings,
                student,
                trained,
                teacher,
                model.directory.tokenizer(),
                training_place(context),
            )
        return outcome, trained

    def _student(self, context: RunContext) -> WholeModel:
        model, device = self._model, context.processes.device
        again = OpenModel(
            model.directory, _Overlaid(model, self._stored), untied_head=not model.is_tied, is_edited=model.is_edited
        )
        student = WholeModel(again, context.dtype, device)
        for name, treatment in self._chosen.items():
            bias = getattr(student.module.get_submodule(name), "bias", None)
            linear = self._linear(name, treatment, bias, context.dtype, device).to(device)
            if isinstance(linear, QatLinear):
                self._linears[name] = linear
            student.module.set_submodule(name, linear)
        return student

    def _linear(
        self, name: str, treatment: Treatment, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """A linear as it is while the model is trained."""
        model, settings = self._model, self._settings
        facts, scheme = model.linears[name], treatment.scheme
        stored = self._stored.beside(facts, device)
        grid = stored_grid(stored, scheme, (facts.rows, facts.columns))
        rounded = stored_values(stored, scheme, grid)
        if self._nested and treatment.rounding != "nested":
            # It stays as it is, since the model reads it, too.
            read = upper_bits(rounded, grid) if scheme.name in NESTED else rounded
            return _fixed(read.to(dtype), bias)
        original = as_rows(model.skeleton.model.get_submodule(name), model.weights.load(facts.key)).to(device)
        stays = self._stays[name] = not_pruned(original)
        if not self._latent_known:
            original = None
        if self._nested:
            give, start = treatment.options.give, rounded if original is None else original
            return NestedQatLinear(start, rounded, grid, give, dtype, bias, rank=settings.lora, stays=stays)
        return QatLinear(
            latent_start(original, rounded, grid),
            grid,
            facts.dtype,
            dtype,
            bias,
            learn_scales=settings.scales > 0,
            rank=settings.lora,
            stays=stays,
        )

    def _trained(self, student: WholeModel) -> dict[str, Trained]:
        frozen = set[str]()
        if self._model.embedding_key.removesuffix("weight") + "weight_scale" in self._stored.names():
            frozen.add(f"{self._model.skeleton.embedding_name}.weight")  # its codes are not trained
        linears = {f"{name}.weight" for name in self._linears} | {f"{name}.bias" for name in self._linears}
        everything = student.trained()
        codes_alone = self._settings.lora is not None or self._nested
        if codes_alone:
            frozen |= everything.keys() - linears
        found = {n: each for n, each in everything.items() if n not in frozen and n not in linears}
        for name in frozen:
            student.module.get_parameter(name).requires_grad_(False)
        for name, linear in self._linears.items():
            if linear.up is not None and linear.down is not None:
                found |= {f"{name}.up": Trained(linear.up), f"{name}.down": Trained(linear.down)}
            else:
                found[f"{name}.latent"] = Trained(linear.latent, stays=self._stays[name])
            if linear.clip is not None:
                found[f"{name}.clip"] = Trained(linear.clip, rate=self._settings.scales, decays=False)
            if linear.bias is not None and codes_alone:
                linear.bias.requires_grad_(False)
            elif linear.bias is not None:
                # The output linear of a removed part is all zeros, and so is its bias.
                stays = self._stays[name]
                gone = None if stays is None or stays.any() else torch.zeros_like(linear.bias, dtype=torch.bool)
                found[f"{name}.bias"] = Trained(linear.bias, decays=False, stays=gone)
        return found

    def _round_the_rest(self, student: WholeModel, hooks: ExitStack) -> None:
        """Quantize activations and the KV cache as the checkpoint will specify."""
        device = student.split.head.weight.device
        for name, treatment in self._chosen.items():
            inputs = treatment.scheme.activations
            if inputs is not None:
                stored = self._stored.beside(self._model.linears[name], device)
                rounding = ActivationRounding.stored_as(inputs, stored)
                hooks.callback(quantize_inputs(student.module.get_submodule(name), rounding).remove)
        if self._cache is None:
            return
        for index, block in enumerate(student.blocks):
            prefix = self._model.attention_prefix(index)
            rounding = KVRounding.stored_as(self._cache, self._stored.after(prefix, device))
            stand_in = RoundedCache(rounding)

            def hand_over(_: nn.Module, args: Any, kwargs: dict[str, Any], stand_in: RoundedCache = stand_in) -> Any:
                return args, {**kwargs, **dict.fromkeys(caches_of(kwargs), stand_in)}

            hooks.callback(block.register_forward_pre_hook(hand_over, with_kwargs=True).remove)

    def _result(
        self, weights: Mapping[str, Tensor], trained: Mapping[str, Trained], device: torch.device
    ) -> dict[str, Tensor]:
        """The trained tensors for the checkpoint: codes and scales, and all others that were trained."""
        found: dict[str, Tensor] = {}
        for name, linear in self._linears.items():
            facts = self._model.linears[name]
            prefix = facts.key.removesuffix("weight")
            kept = {n: t for n, t in self._stored.beside(facts).items() if not n.startswith("weight")}
            # With several processes, the first has the whole weights in main memory.
            rounded = linear.to(device).rounded()
            for local, tensor in (kept | rounded.stored(self._chosen[name].scheme)).items():
                found[prefix + local] = tensor.cpu()
            if linear.bias is not None:
                found[f"{prefix}bias"] = linear.bias.detach().cpu().to(self._model.weights.info(f"{prefix}bias").dtype)
        for name in trained:
            key = self._model.names.get(name)
            if key is not None and key not in found:
                found[key] = weights[name].detach().cpu().to(self._model.weights.info(key).dtype)
        return found


def _fixed(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear with this weight, which is not trained."""
    linear = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
    return linear


class _Stored:
    """A quantize step's stored tensors, by names in the checkpoint."""

    def __init__(self, parts: list[Path]) -> None:
        self._home = {name: file for part in parts for file in [SafetensorsFile(part)] for name in file.tensors}
        self._within: dict[str, list[str]] = {}
        for name in self._home:
            module, _, local = name.rpartition(".")
            self._within.setdefault(f"{module}.", []).append(local)

    def names(self) -> set[str]:
        return set(self._home)

    def load(self, name: str) -> Tensor:
        return self._home[name].load(name)

    def after(self, prefix: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """The tensors right below a module, by local name."""
        return {local: self.load(prefix + local).to(device) for local in self._within.get(prefix, [])}

    def beside(self, facts: LinearFacts, device: torch.device | None = None) -> dict[str, Tensor]:
        """A linear's stored tensors, by local name."""
        return self.after(facts.key.removesuffix("weight"), device)


class _Overlaid(ChangedWeights):
    """A model's weights, except those that a quantize step changed without rounding, and a quantized embedding."""

    def __init__(self, model: OpenModel, stored: _Stored) -> None:
        super().__init__(model.weights)
        self._stored = stored
        self._embedding = model.embedding_key

    def load(self, name: str) -> Tensor:
        prefix = name.removesuffix("weight")
        if f"{prefix}weight_scale" in self._stored.names():
            if name == self._embedding:
                return restored_embedding(self._stored.after(prefix))
            return self._source.load(name)  # it is replaced
        return self._stored.load(name) if name in self._stored.names() else self._source.load(name)
