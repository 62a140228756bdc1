"""A transformers plug-in that loads every checkpoint that Smelt's runtime reads, with the runtime's reader.

transformers loads most Smelt checkpoints by itself, but some not (mixtures of experts with zero-points, blocks that
differ in size), or only with other packages (GPTQ, AWQ), or without quantizing activations. With this module it loads
all of them:

    from smelt.compress import config_for
    model = AutoModelForCausalLM.from_pretrained(path, config=config_for(path))

Weights are dequantized to the model's dtype, and a saved model is unquantized. Activations are quantized as the
checkpoint says, except those of experts, which transformers keeps fused; a warning says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.modeling.kvcache import KV_CACHE_ATTR, register_key_hook, register_value_hook
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.empty_model import give_layer_sizes
from ...models.directory.find import find_checkpoint
from ...models.directory.layer_sizes import LAYER_SIZES
from ...quant.activations import ActivationRounding, quantize_inputs
from ...quant.row_rounding import RowRounding, cache_rounding
from ...runtime.weights.stored import reader_of
from ...system.errors import RuntimeProblem, SmeltError

METHOD = "smelt"
_logger = logging.get_logger(__name__)


def config_for(checkpoint: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """A checkpoint's config, changed so that transformers loads its weights with Smelt's reader.

    Args:
        checkpoint: a directory, a run's output directory or a hub name.
        trust_remote_code: run Python code that comes with it.

    Raises:
        SmeltError: the checkpoint is not quantized and needs no plug-in, or is in a format that Smelt does not read.
    """
    directory = find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code)
    path, config = directory.path, directory.config()
    stored = getattr(config, "quantization_config", None)
    if not stored and getattr(config, LAYER_SIZES, None) is None:
        raise SmeltError(f"{path}: its weights are not quantized; transformers loads them without a config")
    settings = SmeltConfig(stored=stored, path=str(path))
    SmeltQuantizer(settings)  # raises if its reader does not support the method
    directory.check_weights(config, CheckpointWeights(path))
    config.quantization_config = settings.to_dict()
    return config


class SmeltConfig(QuantizationConfigMixin):
    """Settings of :class:`SmeltQuantizer` for a checkpoint.

    Args:
        stored: the checkpoint's own ``quantization_config``; None for unquantized weights.
        path: where the checkpoint is.
    """

    def __init__(self, stored: dict[str, Any] | None, path: str, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.stored = stored
        self.path = path
        self.dequantize = True


class SmeltQuantizer(HfQuantizer):
    """Dequantizes weights while transformers loads them."""

    # What each format stores for a weight, as transformers asks for it.
    serialized_names = {  # noqa: RUF012 - transformers' own attribute
        "weight": [
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_global_scale",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
            "input_global_scale",
            "qweight",
            "qzeros",
            "scales",
            "g_idx",
        ]
    }

    def __init__(self, quantization_config: SmeltConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._parts = _Parts()
        try:
            self._reader = reader_of(quantization_config.stored, self._parts)
        except RuntimeProblem as problem:
            raise SmeltError(f"{quantization_config.path}: {problem}") from None
        self._stored_name = _names_in(Path(quantization_config.path))
        self._inputs: dict[str, ActivationRounding] = {}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Restore}

    def is_serializable(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        return True

    def restored(self, name: str, parts: dict[str, Tensor], dtype: torch.dtype, kind: str = "Linear") -> Tensor:
        """The dequantized weight of the module that the model calls ``name``, from its stored tensors by local name."""
        stored = self._stored_name(name)
        self._parts.hold(stored, parts)
        matrix = self._reader.matrix(stored, kind)
        if matrix.inputs is not None:
            self._inputs[name] = matrix.inputs
        return matrix.dense(dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        give_layer_sizes(model)
        keys_values = (self.quantization_config.stored or {}).get("kv_cache_scheme")  # type: ignore[union-attr]
        if keys_values is not None:
            _round_keys_values(model, keys_values)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if hasattr(model, "_weight_conversions"):
            del model._weight_conversions  # so that it is saved as if it had never been quantized
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, rounding in self._inputs.items():
            if name in linears:
                quantize_inputs(linears[name], rounding)
        if self._inputs.keys() - linears.keys():
            _logger.warning(
                "The activations of experts are not quantized here, though the checkpoint says so; Smelt's runtime does it."
            )
        return model


def _round_keys_values(model: nn.Module, scheme: dict[str, Any]) -> None:
    """Let compressed-tensors quantize the KV cache, as when transformers loads the checkpoint without Smelt.

    With dynamic scales Smelt rounds instead, because in compressed-tensors' arithmetic the last bit of a key decides
    between two codes.
    """
    only = QuantizationConfig.model_validate({"config_groups": {}, "kv_cache_scheme": scheme})
    only.quantization_status = QuantizationStatus.COMPRESSED
    apply_quantization_config(model, only, show_progress=False)
    assert only.kv_cache_scheme is not None
    rounding = cache_rounding(ActivationRounding(only.kv_cache_scheme))
    if isinstance(rounding, RowRounding):
        attentions: list[Any] = [module for module in model.modules() if hasattr(module, KV_CACHE_ATTR)]
        for attention in attentions:
            attention.quantization_enabled = False
            for register in (register_key_hook, register_value_hook):
                register(attention, lambda _, rows, rounding=rounding: rounding(rows))


register_quantization_config(METHOD)(SmeltConfig)
register_quantizer(METHOD)(SmeltQuantizer)


class _Restore(ConversionOps):
    """Dequantizes the stored tensors of a linear, or of a block's experts."""

    def __init__(self, hf_quantizer: SmeltQuantizer) -> None:
        # This name makes transformers keep the stored dtypes.
        self.hf_quantizer: SmeltQuantizer = hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Restore:
        return self  # transformers copies its converters for every weight; all report to one quantizer

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        dtype = model.get_parameter(full_layer_name).dtype
        bases: dict[str, dict[str, list[Tensor]]] = {}
        for pattern, found in input_dict.items():
            base, _, kind = pattern.rpartition(".")
            bases.setdefault(base, {})[kind] = found if isinstance(found, list) else [found]
        if "" in bases:  # one linear, or any other parameter of that name
            name = full_layer_name.removesuffix(".weight")
            is_table = isinstance(model.get_submodule(full_layer_name.rpartition(".")[0]), nn.Embedding)
            parts = {kind: each[0] for kind, each in bases[""].items()}
            return {full_layer_name: self._one(name, parts, dtype, "Embedding" if is_table else "Linear")}
        restored = {}
        for base, kinds in bases.items():
            before = full_layer_name.partition("experts.")[0]
            leaf = base.rpartition(".")[2]
            each = []
            for number in range(len(next(iter(kinds.values())))):
                parts = {kind: tensors[number] for kind, tensors in kinds.items()}
                each.append(self._one(f"{before}experts.{number}.{leaf}", parts, dtype))
            restored[f"{base}.weight"] = each
        return restored

    def _one(self, name: str, parts: dict[str, Tensor], dtype: torch.dtype, kind: str = "Linear") -> Tensor:
        if set(parts) == {"weight"}:
            return parts["weight"].to(dtype)
        device = next(iter(parts.values())).device
        values = self.hf_quantizer.restored(name, {part: tensor.cpu() for part, tensor in parts.items()}, dtype, kind)
        return values.to(device, dtype)


class _Parts:
    """One linear's stored tensors, in the interface of the runtime's reader."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def hold(self, name: str, parts: dict[str, Tensor]) -> None:
        """Hold the tensors of linear ``name`` only."""
        self._held = {f"{name}.{kind}": tensor for kind, tensor in parts.items()}

    def has(self, name: str) -> bool:
        """Whether a tensor exists."""
        return name in self._held

    def tensor(self, name: str) -> Tensor:
        """A tensor."""
        return self._held[name]


def _names_in(path: Path) -> Callable[[str], str]:
    """From a linear's name in the model to its name in the checkpoint, which differ where transformers renamed modules.

    They have their numbers and their last part in common.
    """
    stored = {name.rpartition(".")[0] for name in CheckpointWeights(path).names()}
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name in stored:
        alike.setdefault(_likeness(name), []).append(name)

    def stored_name(name: str) -> str:
        found = alike.get(_likeness(name), [])
        return found[0] if name not in stored and len(found) == 1 else name

    return stored_name


def _likeness(name: str) -> tuple[tuple[str, ...], str]:
    return tuple(re.findall(r"(?<=\.)\d+(?=\.)", name)), name.rpartition(".")[2]
