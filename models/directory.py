"""A model directory: its configuration and its tokenizer, refusing what Smelt must not or cannot open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.errors import SmeltError
from .layer_sizes import LAYER_SIZES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelDirectory:
    """A Hugging Face model on this disk.

    Attributes:
        name: what the recipe called it.
        path: where its files are.
        trust_remote_code: whether Python code that comes with it may run.
        as_dense: whether a quantized checkpoint stands for the dense model that its weights mean.
        changes: fields of ``config.json`` that are to be others.
    """

    name: str
    path: Path
    trust_remote_code: bool = False
    as_dense: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def config_data(self) -> dict[str, Any]:
        """``config.json`` with its changes; without its ``quantization_config`` if it stands for a dense model."""
        path = self.path / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SmeltError(
                f"{self.path}: has no config.json, so it is not a Hugging Face model; check the path"
            ) from None
        except ValueError as error:
            raise SmeltError(f"{path}: is not valid JSON ({error}); download it again") from None
        if not isinstance(data, dict):
            raise SmeltError(f"{path}: does not hold a model configuration; download it again")
        data |= self.changes
        # A change cannot remove a field, but blocks may have become alike.
        left_out = {name for name in (LAYER_SIZES,) if name in data and data[name] is None}
        if self.as_dense:
            left_out.add("quantization_config")
        return {name: value for name, value in data.items() if name not in left_out}

    def config(self) -> PretrainedConfig:
        """The model's configuration, once it is known to be a causal LM that may be opened."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        data = self.config_data()
        self._refuse_remote_code(data)
        if data.get("quantization_config"):
            method = data["quantization_config"].get("quant_method", "an unknown method")
            raise SmeltError(f"{self.path}: is already quantized ({method}); start from the original model")
        try:
            config = AutoConfig.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
            if self.changes:
                config = type(config).from_dict(data)
        except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
            kind = data.get("model_type")
            first = " ".join(str(error).split())[:300]
            raise SmeltError(
                f"{self.path}/config.json: transformers cannot open model_type {kind!r} ({first})"
            ) from None
        if self.as_dense and hasattr(config, "quantization_config"):
            delattr(config, "quantization_config")
        names = data.get("architectures") or []
        if config.is_encoder_decoder or any("Seq2Seq" in n or n.endswith("ForConditionalGeneration") for n in names):
            raise SmeltError(
                f"{self.path}: {names or config.model_type} is no decoder-only language model; Smelt compresses only those"
            )
        encoder = names and not any(n.endswith(("ForCausalLM", "LMHeadModel")) or "CausalLM" in n for n in names)
        if encoder or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not self.trust_remote_code):
            raise SmeltError(
                f"{self.path}: {names[0] if names else config.model_type} is not a causal language model"
                " (an encoder, perhaps); Smelt compresses decoder-only models, named …ForCausalLM"
            )
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # tokenizers raise bare Exception on bad files
            first = str(error).split("\n")[0]
            raise SmeltError(f"{self.path}: its tokenizer cannot be loaded ({first}); add tokenizer.json") from None

    def _refuse_remote_code(self, data: dict[str, Any]) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore

        if data.get("auto_map") and data.get("model_type") not in CONFIG_MAPPING_NAMES and not self.trust_remote_code:
            raise SmeltError(
                f"{self.path}: needs Python code that comes with the model, which is not run unless asked for;"
                " read that code, then set trust_remote_code: true"
            )
